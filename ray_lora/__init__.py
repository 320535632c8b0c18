"""One base model, hundreds of LoRA adapters, served from several accelerators.

The path of a request, and the folder that each step lives in:

1. `serve/`     HTTP or a handle call becomes a `GenerateRequest`; the tokenizer turns text into ids.
2. `engine/`    The scheduler admits it, finds its cached prefix, pins its adapter's pages and writes a `StepPlan`.
3. `cluster/`   The plan reaches every rank, in this process or over a connection to each rank's Ray actor.
4. `model/`     Each rank turns the plan into tensors and runs one step; rank 0 samples.
5. `ops/`       In every linear layer, one kernel adds the delta of all adapters in the batch.
6. `backends/`  What a device does better than the reference.

Adapters come the other way: `adapters/` checks the files, `cluster/` carries each rank its part and holds the barrier.
"""

from typing import TYPE_CHECKING, Any

from ray_lora.adapter import AdapterInfo
from ray_lora.config import EngineConfig
from ray_lora.errors import (
    AdapterExistsError,
    AdapterRejectedError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    NumericsError,
    RayLoraError,
    VersionConflictError,
)
from ray_lora.request import (
    CompletionDelta,
    CompletionOutput,
    GenerateChunk,
    GenerateRequest,
    Logprob,
    RequestOutput,
    SamplingParams,
)
from ray_lora.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from ray_lora.llm import LLM

__all__ = [
    "LLM",
    "AdapterExistsError",
    "AdapterInfo",
    "AdapterRejectedError",
    "CapacityError",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "GenerateChunk",
    "GenerateRequest",
    "InvalidRequestError",
    "Logprob",
    "NotFoundError",
    "NumericsError",
    "RayLoraError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "VersionConflictError",
]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is first asked for: the policy of the engine needs no torch, and `LLM` does."""
    if name == "LLM":
        from ray_lora.llm import LLM

        return LLM
    raise AttributeError(f"module 'ray_lora' has no attribute {name!r}")

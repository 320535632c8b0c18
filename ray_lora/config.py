"""The configuration of a replica: one frozen object, vLLM's names, unknown keys refused with the nearest known one."""

import difflib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ray_lora.adapter import MAX_WEIGHT, MIN_WEIGHT, PAGE_RANK, num_pages
from ray_lora.errors import ConfigError
from ray_lora.tenant import ApiKey, Limits, hash_key

MAX_RANK = 512
MAX_FETCHES = 4
"""Downloads of adapters at a time, so that threads are left for everything else."""


def _environment_allows_runtime_lora_updating() -> bool:
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in ("1", "true")


def _environment_api_keys() -> list[Any]:
    try:
        keys = json.loads(os.environ.get("RAY_LORA_API_KEYS") or "[]")
    except ValueError as error:
        raise ConfigError(f"RAY_LORA_API_KEYS is not valid JSON: {error}") from None
    if not isinstance(keys, list):
        raise ConfigError("RAY_LORA_API_KEYS is not a list of keys")
    if key := os.environ.get("VLLM_API_KEY"):
        keys.append({"name": "VLLM_API_KEY", "sha256": hash_key(key), "may_load": True})
    return keys


class LoRAModule(BaseModel):
    """An adapter to load at start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str
    base_model_name: str | None = None
    """Accepted for vLLM's sake; must be a served name of this model."""
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    """Of its share of the service, as long as none was set at run time."""
    pinned: bool = False
    """Whether it stays in host memory and on the device, as long as nothing else was said at run time."""


class EngineConfig(BaseModel):
    """Every key of a deployment's `args`, and of `LLM(...)`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Hugging Face directory: `config.json`, safetensors, `tokenizer.json`."""
    served_model_name: str | None = None
    """The base model's name in the API; the directory's name if not given."""
    tokenizer: str | None = None
    """Directory of the tokenizer, if it is not the model's."""
    chat_template: str | None = None
    """A Jinja template, or a path to one, in place of the tokenizer's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the checkpoint's, but float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """`auto` is `cpu`."""
    seed: int = 0
    """Base of the random streams of requests that bring no seed."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt plus output, in tokens; the model's own limit if not given."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests in one step."""
    max_num_batched_tokens: int = Field(1024, ge=1)
    """Tokens in one step; longer prompts are computed in chunks."""
    block_size: int = Field(16, ge=1, le=256)
    """Tokens in one KV block."""
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """KV cache of one rank; by default 1 GiB on a CPU, and what `gpu_memory_utilization` leaves on other devices."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Part of a device's memory for weights, adapter pages and KV cache, other processes' included; activations and
    the collectives' buffers have the rest. No matter on a CPU."""
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    """Launch every operator of every step. Otherwise decode steps are captured as graphs at the start, where the device
    can (an NPU); no matter on others."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Requests in a captured decode step; one with fewer is padded to the next size, one with more is not captured. By
    default 1, 2, 4, multiples of 8 to 256 and of 16 from there, up to `max_num_seqs`."""

    max_loras: int = Field(16, ge=0)
    """Adapters on the device at once; 0 turns LoRA off."""
    max_lora_rank: int = Field(64, ge=1, le=MAX_RANK)
    max_lora_pages: int | None = Field(None, ge=1)
    """Pages of 16 ranks on the device; by default enough for `max_loras` adapters of `max_lora_rank`."""
    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters in host memory at once, the most recently used; the others wait on disk and come up with their next
    request. By default 64, or `max_loras` if that is more."""
    max_cpu_lora_bytes: int | None = Field(None, ge=1)
    """Host memory of one rank for them, besides; by default their number alone is limited."""
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    lora_modules: tuple[LoRAModule, ...] = ()
    """Adapters loaded at start: a list of `{name, path}` or `name=path`, or a mapping of names to paths."""
    base_model_weight: float = Field(1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    """Of the base model's share of the service, beside the adapters'."""
    adapter_store_dir: str = "~/.cache/ray_lora/adapters"
    """Content-addressed copies of loaded adapters, and beside each what the ranks hold of it."""
    adapter_store_max_bytes: int = Field(64 << 30, ge=1)
    """All of it together; beyond that the least recently used go, but no copy of one that is registered."""
    max_adapter_bytes: int = Field(32 << 30, ge=1)
    """Weights of one adapter. Rank 512 on every projection of a 70B model, in float32, is 27 GB."""
    adapter_fetch_retries: int = Field(3, ge=0)
    """How often a download is tried again after a transient failure."""
    lora_resolver_dir: str | None = None
    """A local directory whose folders are adapters: one that is requested by its name is loaded on first use."""
    lora_registry_path: str | None = None
    """A file that remembers the adapters loaded at run time, for a server that starts again. On Kubernetes, put it on a
    volume that every pod has; `adapter_store_dir` too, if what was loaded from a path of one pod is to come back after
    all have gone."""
    adapter_load_timeout_s: float = Field(60.0, gt=0)
    """Longest wait of a rank for the others while an adapter is staged."""
    allow_runtime_lora_updating: bool = Field(default_factory=_environment_allows_runtime_lora_updating)
    """Whether adapters may be loaded, replaced and unloaded over HTTP; by default what vLLM's environment variable
    VLLM_ALLOW_RUNTIME_LORA_UPDATING says, and otherwise not."""

    api_keys: tuple[ApiKey, ...] = Field(default_factory=_environment_api_keys, validate_default=True)
    """Whoever calls over HTTP must have one of these or of `api_keys_file`, if there are any. By default those of
    RAY_LORA_API_KEYS, a list as in the file, in JSON; and the key in vLLM's VLLM_API_KEY, which may do everything."""
    api_keys_file: str | None = None
    """YAML or JSON, a list of what `ray-lora key new` prints; read again whenever it changes."""
    allow_unauthenticated: bool = False
    """Serve other machines without any keys; otherwise a server without keys starts on loopback only."""
    adapter_limits: dict[str, Limits] = {}
    """By adapter; `*` is each one that is not named, and the base model's name is the base model."""
    max_request_body_bytes: int = Field(32 << 20, ge=1)
    """Of one HTTP request; a longer one is refused with 413, and not read to its end."""
    max_queued_requests: int | None = Field(1024, ge=1)
    """Completions that may be without their first token, all callers together; more are refused at once, with 503."""
    queue_timeout_s: float | None = Field(None, gt=0)
    """A request that has not begun to run by then is refused, with 503; by default it waits. With this or the next, no
    more are let in than could lately be answered in time."""
    request_timeout_s: float | None = Field(None, gt=0)
    """A request that has not ended by then, counted from its arrival, is aborted, with 504."""

    replica_timeout_s: float = Field(120.0, gt=0)
    """A request for which no replica is running, as while the only one is being rebuilt, waits this long for one and is
    then refused, with 503; or until one of the two timeouts above, if that is sooner."""

    tensor_parallel_size: int = Field(1, ge=1)
    distributed_executor_backend: Literal["auto", "local", "ray"] = "auto"
    """`local` keeps the only rank in this process; `auto` is `local` for one rank on a CPU and `ray` otherwise, for Ray
    tells each rank which GPU or NPU is its own."""
    placement_group_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """The ranks of a replica are on one node, unless this says otherwise."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of one rank on a CPU; by default the usable cores divided by the ranks."""
    rank_num_cpus: float = Field(0.1, gt=0)
    """CPUs that Ray reserves for one rank actor; its threads are `num_threads`, whatever is reserved."""
    step_timeout_s: float = Field(300.0, gt=0)
    """A step that takes longer means a dead rank."""

    max_adapter_labels: int = Field(64, ge=0)
    """Adapters that metrics tell apart; the others are one."""
    enable_log_requests: bool = False
    """Also log what was asked: prompts and sampling parameters."""
    otlp_traces_endpoint: str | None = None
    """Where to send traces by OTLP over HTTP, e.g. `http://collector:4318/v1/traces`; none are made by default."""

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _parse_lora_modules(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return [{"name": name, "path": path} for name, path in value.items()]
        if isinstance(value, (list, tuple)):
            return [_parse_lora_module(item) for item in value]
        return value

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.distributed_executor_backend == "local" and self.tensor_parallel_size > 1:
            raise ValueError("distributed_executor_backend 'local' keeps one rank; tensor_parallel_size must be 1")
        for module in self.lora_modules:
            if module.base_model_name not in (None, self.base_model_name):
                raise ValueError(
                    f"lora_modules: {module.name!r} is for {module.base_model_name!r}, not {self.base_model_name!r}"
                )
        if self.lora_modules and self.max_loras == 0:
            raise ValueError("lora_modules are given but max_loras is 0")
        if self.lora_resolver_dir is not None and self.max_loras == 0:
            raise ValueError("lora_resolver_dir is given but max_loras is 0")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras {self.max_cpu_loras} is less than max_loras {self.max_loras}")
        if self.max_lora_pages is not None and self.max_lora_pages < num_pages(self.max_lora_rank):
            raise ValueError(
                f"max_lora_pages {self.max_lora_pages} cannot hold one adapter of max_lora_rank {self.max_lora_rank} "
                f"({num_pages(self.max_lora_rank)} pages of {PAGE_RANK})"
            )
        sizes = self.cudagraph_capture_sizes or ()
        if any(not 1 <= size <= self.max_step_seqs for size in sizes):
            raise ValueError(
                f"cudagraph_capture_sizes {list(sizes)} are not all within 1 and {self.max_step_seqs}, the "
                "requests of a step"
            )
        queue_s, request_s = self.queue_timeout_s, self.request_timeout_s
        if queue_s is not None and request_s is not None and queue_s > request_s:
            raise ValueError(f"queue_timeout_s {queue_s} is more than request_timeout_s {request_s}")
        return self

    @classmethod
    def parse(cls, args: dict[str, Any]) -> "EngineConfig":
        """Build from user input.

        Raises:
            ConfigError: one line that names the key at fault.
        """
        unknown = [key for key in args if key not in cls.model_fields]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), cls.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown key {unknown[0]!r}{hint}")
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError(first_fault(error)) from None

    @property
    def model_path(self) -> Path:
        return Path(self.model).expanduser()

    @property
    def base_model_name(self) -> str:
        return self.served_model_name or self.model_path.name

    @property
    def needs_api_key(self) -> bool:
        """Whether a caller over HTTP does, even if the file has none yet."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def num_lora_pages(self) -> int:
        if self.max_loras == 0:
            return 0
        return self.max_lora_pages or self.max_loras * num_pages(self.max_lora_rank)

    @property
    def max_step_seqs(self) -> int:
        """Requests that one step can have: each has a token at least."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the decode steps that are captured, rising; none if `enforce_eager`."""
        if self.enforce_eager:
            return ()
        if self.cudagraph_capture_sizes is not None:
            return tuple(sorted(set(self.cudagraph_capture_sizes)))
        most = self.max_step_seqs
        usual = (1, 2, 4, *range(8, 257, 8), *range(272, most, 16))
        return (*(size for size in usual if size < most), most)

    @property
    def max_staged_loras(self) -> int:
        return self.max_cpu_loras or max(64, self.max_loras)

    @property
    def uses_ray(self) -> bool:
        if self.distributed_executor_backend == "auto":
            return self.tensor_parallel_size > 1 or self.device in ("cuda", "npu")
        return self.distributed_executor_backend == "ray"

    @property
    def num_rank_threads(self) -> int:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.num_threads or max(1, usable // self.tensor_parallel_size)


def first_fault(error: ValidationError) -> str:
    """One line that names the key at fault."""
    first = error.errors()[0]
    where = repr(".".join(str(part) for part in first["loc"]))[1:-1]  # a mapping's keys may hold anything
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _parse_lora_module(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    name, separator, path = item.partition("=")
    if not separator or not name or not path:
        raise ValueError(f"{item!r} is not of the form name=path")
    return {"name": name, "path": path}

"""One rank: its part of the model, its caches, and the execution of plans."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ray_lora.adapter import num_pages
from ray_lora.adapters.shard import DTYPES, AdapterShard
from ray_lora.architecture import Architecture, read_architecture
from ray_lora.backends.base import Backend
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError, EngineDeadError
from ray_lora.model.adapter_copies import AdapterCopies
from ray_lora.model.adapter_pool import AdapterPool, page_bytes
from ray_lora.model.batch import Batch, build_batch
from ray_lora.model.checkpoint import Checkpoint
from ray_lora.model.kv_cache import KVCache, block_bytes, local_kv_heads
from ray_lora.model.llama import Decoder
from ray_lora.model.memory_plan import kv_cache_bytes
from ray_lora.model.rotary import RotaryTables
from ray_lora.model.sampler import Sampler, token_logprobs
from ray_lora.model.step_graphs import StepGraphs, num_padding_blocks
from ray_lora.model.tensor_parallel import TensorParallel
from ray_lora.model.unpaged_part import Members, UnpagedPart, group_rows
from ray_lora.ops.step_tables import StepLimits
from ray_lora.step import ModelInfo, SampledToken, SequencePlan, StepPlan, StepResult, TokenLogprobs

PROMPT_LOGPROB_ROWS = 64
"""Rows of logits held at once for `prompt_logprobs`."""


class ModelRunner:
    """Executes plans in the order given. Adapters are staged in host memory from another thread meanwhile."""

    def __init__(self, config: EngineConfig, parallel: TensorParallel, backend: Backend) -> None:
        arch = read_architecture(config.model_path)
        arch.check_tensor_parallel(parallel.size)
        dtype = resolve_dtype(config.dtype, arch, backend)
        self.arch = arch
        self.adapter_dtype = dtype if config.lora_dtype == "auto" else DTYPES[config.lora_dtype]
        if self.adapter_dtype != dtype and not backend.mixes_dtypes:
            raise ConfigError(
                f"lora_dtype {config.lora_dtype}: on {backend.name} it must be that of the model, {dtype}"
            )
        heads = arch.num_heads // parallel.size, local_kv_heads(arch, parallel.size), arch.head_dim
        backend.check_model(*heads, config.block_size, dtype)
        kv_bytes = kv_cache_bytes(config, arch, parallel, dtype, self.adapter_dtype, backend)
        self.info = model_info(config, arch, parallel.size, dtype, self.adapter_dtype, kv_bytes)
        self._parallel = parallel
        self._backend = backend
        self._block_size = config.block_size
        self._rotary = RotaryTables(arch, self.info.max_model_len, backend.device)
        graph_sizes = config.graph_sizes if backend.captures else ()
        num_blocks = self.info.num_kv_blocks + num_padding_blocks(graph_sizes, config.block_size)
        cache = KVCache(arch, parallel.size, num_blocks, config.block_size, dtype, backend)
        self._pool = (
            AdapterPool(
                arch,
                parallel.rank,
                parallel.size,
                config.num_lora_pages,
                config.max_loras,
                self.adapter_dtype,
                dtype,
                backend.device,
            )
            if config.num_lora_pages
            else None
        )
        self.open_checkpoint = partial(Checkpoint, config.model_path, arch, dtype)
        self._decoder = Decoder(arch, self.open_checkpoint(), cache, self._pool, parallel, backend)
        backend.release_unused_memory()
        limits = step_limits(config, arch, self.info)
        backend.reserve(limits, dtype)
        self._graphs = StepGraphs(
            graph_sizes, limits, config.block_size, self.info.num_kv_blocks, backend, self._decoder.forward
        )
        self._graphs.capture(self._rotary.cos, self._rotary.sin)
        self._sampler = Sampler()
        self._copies = AdapterCopies(self._pool, backend.streams()) if self._pool is not None else None
        self._staged: dict[str, AdapterShard] = {}
        self._fused_modules: dict[str, frozenset[str]] = {}
        self._output_modules: dict[str, frozenset[str]] = {}
        self._unpaged: Mapping[str, UnpagedPart] = self._pool.unpaged if self._pool is not None else {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step; rank 0 returns what was sampled, the others None. Without sequences the ranks only meet."""
        for request_id in plan.finished:
            self._sampler.finish(request_id)
        for start in plan.starts:
            self._sampler.start(start)
        for adapter in plan.page_ins:
            assert self._copies is not None, "a plan pages in an adapter, but LoRA is off"
            self._copies.page_in(adapter, self._staged[adapter.version])
        if self._copies is not None:
            self._copies.wait_for(adapter.version for adapter in plan.adapters)
        if not plan.sequences:
            return self._meet(plan)
        batch = build_batch(
            plan,
            self._block_size,
            self._rotary,
            self._prompt_len,
            self._fused_modules,
            self._output_modules,
            self._unpaged,
            self._backend.device,
        )
        hidden = self._graphs.run(batch)
        if hidden is None:
            batch = self._backend.place(batch)
            hidden = self._decoder.forward(batch)
        return self._finish(plan, batch, hidden)

    def _meet(self, plan: StepPlan) -> StepResult | None:
        """Sum a one over the ranks, on their devices."""
        total = self._parallel.all_reduce_(torch.ones(1, device=self._backend.device)).item()
        if total != self._parallel.size:
            raise EngineDeadError(f"{self._parallel.size} ranks sum up to {total}")
        return StepResult(plan.step_id) if self._parallel.rank == 0 else None

    def stage(self, shard: AdapterShard) -> None:
        """Keep this rank's part of an adapter in host memory, from where plans page it in."""
        self._fused_modules[shard.version] = shard.fused_modules(self.arch)
        if shard.outputs:
            self._output_modules[shard.version] = shard.output_modules(self.arch)
        self._staged[shard.version] = replace(shard, payload=self._backend.pinned(shard.payload))

    def drop(self, version: str) -> None:
        """Free a staged adapter, if there is one of that version."""
        self._staged.pop(version, None)
        self._fused_modules.pop(version, None)
        self._output_modules.pop(version, None)
        if self._pool is not None and self._copies is not None:
            self._pool.forget(version)
            self._copies.forget(version)

    @property
    def staged_versions(self) -> frozenset[str]:
        return frozenset(self._staged)

    def _finish(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> StepResult | None:
        one_row_each = len(hidden) == len(plan.sequences)
        last = hidden if one_row_each else hidden[(batch.tables.query_starts[1:] - 1).long()]
        sampling = [index for index, sequence in enumerate(plan.sequences) if sequence.sample]
        prompt_logprobs = self._prompt_logprobs(plan, batch, hidden)
        sampled: tuple[SampledToken, ...] = ()
        if sampling:
            rows = last if len(sampling) == len(plan.sequences) else last[sampling]
            logits = self._decoder.logits(
                rows, self._members(plan.version_of(plan.sequences[index]) for index in sampling)
            )
            if logits is not None:
                sampled = self._sampler.sample([plan.sequences[index] for index in sampling], logits)
        if self._parallel.rank != 0:
            return None
        return StepResult(plan.step_id, sampled, prompt_logprobs)

    def _prompt_logprobs(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        if not any(sequence.prompt_logprobs for sequence in plan.sequences):
            return {}
        starts = list(pairwise(batch.tables.query_starts.tolist()))
        return {
            sequence.request_id: tuple(
                self._chunk_logprobs(sequence, plan.version_of(sequence), hidden, *starts[index])
            )
            for index, sequence in enumerate(plan.sequences)
            if sequence.prompt_logprobs
        }

    def _chunk_logprobs(
        self, sequence: SequencePlan, version: str | None, hidden: Tensor, first: int, last: int
    ) -> Iterator[TokenLogprobs]:
        """Logprobs of the prompt tokens that follow rows `first:last`; empty on ranks other than 0."""
        targets = self._sampler.prompt(sequence.request_id)[sequence.start + 1 : sequence.start + last - first + 1]
        num_top = self._sampler.num_prompt_logprobs(sequence.request_id)
        for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + PROMPT_LOGPROB_ROWS]
            rows = hidden[first + begin : first + begin + len(part)]
            logits = self._decoder.logits(rows, self._members([version] * len(part)))
            if logits is not None:
                for row, token_id in zip(logits.float().cpu(), part, strict=True):
                    yield token_logprobs(row, token_id, num_top)

    def _members(self, versions: Iterable[str | None]) -> Members:
        """Rows of adapters that may bring a head, where row `i` uses the adapter `versions[i]`."""
        return group_rows(versions, self._unpaged, self._backend.device) if self._unpaged else ()

    def _prompt_len(self, request_id: int) -> int:
        return len(self._sampler.prompt(request_id))


def resolve_dtype(name: str, arch: Architecture, backend: Backend) -> torch.dtype:
    """`auto` is the checkpoint's type, but float32 on a CPU."""
    if name == "auto":
        name = "float32" if backend.device.type == "cpu" else arch.dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def step_limits(config: EngineConfig, arch: Architecture, info: ModelInfo) -> StepLimits:
    return StepLimits(
        max_tokens=config.max_num_batched_tokens,
        max_sequences=config.max_step_seqs,
        max_blocks=-(-info.max_model_len // config.block_size),
        max_pages=config.num_lora_pages,
        max_adapter_pages=min(config.num_lora_pages, num_pages(config.max_lora_rank)),
        linears=tuple(fused.name for fused in arch.fused_linears),
        head_dim=arch.head_dim,
    )


def model_info(
    config: EngineConfig,
    arch: Architecture,
    tp_size: int,
    dtype: torch.dtype,
    adapter_dtype: torch.dtype,
    kv_bytes: int,
) -> ModelInfo:
    """What this rank can serve within its configured memory.

    Raises:
        ConfigError: `max_model_len` is beyond the model, or the KV cache cannot hold one sequence of that length.
    """
    longest = arch.max_context_len
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(f"max_model_len {max_model_len} exceeds the model's {longest}")
    bytes_per_block = block_bytes(arch, tp_size, config.block_size, dtype)
    num_blocks = kv_bytes // bytes_per_block
    needed = -(-max_model_len // config.block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"kv_cache_memory_bytes {kv_bytes} holds {num_blocks * config.block_size} tokens but "
            f"max_model_len is {max_model_len}; give at least {needed * bytes_per_block} bytes or lower max_model_len"
        )
    has_stable_prefixes = arch.rope.rope_type != "dynamic" or max_model_len <= arch.max_position_embeddings
    return ModelInfo(
        arch.vocab_size,
        max_model_len,
        num_blocks,
        arch.eos_token_ids,
        page_bytes(arch, tp_size, adapter_dtype),
        has_stable_prefixes,
    )

"""A replica's counters at one moment, as `/metrics` shows them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    """Share of KV blocks in use by running requests, from 0 to 1."""
    num_preemptions: int
    prompt_tokens: int
    """Prompt tokens computed or found in the prefix cache, since the start."""
    generation_tokens: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    requests_succeeded: dict[str, int]
    """By finish reason."""
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    resident_adapters: tuple[str, ...]
    num_lora_pages: int
    num_free_lora_pages: int

"""One completion on its way through the scheduler."""

from ray_lora.engine.adapter_version import Version
from ray_lora.engine.block_manager import root_key
from ray_lora.engine.grammar import Grammar
from ray_lora.request import FinishReason, SamplingParams
from ray_lora.step import TokenLogprobs


class SequenceState:
    """The tokens and counters of one completion. The scheduler alone changes it.

    The KV of the first `num_computed_tokens` tokens is in `block_ids`; the keys of the first `len(block_keys)` blocks
    are sealed, so others may share them.
    """

    __slots__ = (
        "adapter",
        "adapter_name",
        "block_ids",
        "block_keys",
        "finish_reason",
        "grammar",
        "key_name",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "priority",
        "prompt_logprobs",
        "request_id",
        "root_key",
        "sampling_params",
        "seed",
        "started",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        seed: int,
        stop_token_ids: tuple[int, ...],
        adapter: Version | None,
        key_name: str | None = None,
        cache_salt: str | None = None,
        adapter_name: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.adapter = adapter
        self.adapter_name = adapter_name
        """The name that it came under, which may point to another version by now."""
        self.key_name = key_name
        self.priority: float = priority
        """As it was asked for, until its turn has come; see `fair_queue.py`."""
        self.grammar = grammar
        """What it must match, if anything, as far as its tokens have come in it."""
        self.root_key = root_key(self.adapter_version, key_name, cache_salt)
        """Start of its chain of block keys."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_charged_tokens = 0
        """Prompt tokens that have been computed for it, or found, and that its queue is not charged for again."""
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []
        self.started = False
        """Whether the ranks know its sampling parameters."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def place(self) -> tuple[float, int]:
        """Among the requests under its name, the lowest is served first."""
        return self.priority, self.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV must still be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def adapter_version(self) -> str | None:
        return None if self.adapter is None else self.adapter.manifest.version

    def follow_grammar(self) -> None:
        """Go on in its grammar after the last token.

        Raises:
            InvalidRequestError: the grammar is too complex to go on.
        """
        if self.grammar is not None and self.finish_reason is None:
            self.grammar.accept(self.token_ids[-1])

"""Which KV blocks are free, held and cached. Holds ids, decides, and never sees a tensor."""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_key(adapter_version: str | None, key_name: str | None = None, cache_salt: str | None = None) -> bytes:
    """Start of a chain of block keys.

    KV depends on the exact weights, so on the adapter's version and not its name. API keys and salts have chains of
    their own, so that nobody learns from the time to a first token what others have asked. As a list in JSON, no value
    of one can be taken for a value of another.
    """
    return hashlib.sha256(json.dumps([adapter_version, key_name, cache_salt]).encode()).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block: everything its KV depends on, which is its own tokens and all that came before."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockManager:
    """Hands out KV blocks and remembers which of them hold a known prefix.

    A block is *held* by one or more requests, or *free*. A free block that still holds a known prefix is found by
    `find_cached` until it is handed out again, least recently freed first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached(self, root: bytes, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Blocks, and their keys, of the longest cached prefix that leaves at least one token to compute."""
        blocks: list[int] = []
        keys: list[bytes] = []
        if not self.enable_prefix_caching:
            return blocks, keys
        key = root
        for index in range((len(token_ids) - 1) // self.block_size):
            key = block_key(key, token_ids[index * self.block_size : (index + 1) * self.block_size])
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
            keys.append(key)
        return blocks, keys

    def can_allocate(self, num_new: int, cached: Iterable[int] = ()) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        return num_new + sum(self._num_holders[block] == 0 for block in cached) <= len(self._free)

    def allocate(self, num_new: int, cached: Sequence[int] = ()) -> list[int]:
        """Hold the `cached` blocks and `num_new` fresh ones, in this order. Ask `can_allocate` first."""
        for block in cached:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1
        fresh = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for block in fresh:
            self._forget(block)
            self._num_holders[block] = 1
        return [*cached, *fresh]

    def seal(self, block: int, key: bytes) -> None:
        """A held block is full and computed: others may now find it. The first block with a key keeps it."""
        if self.enable_prefix_caching and key not in self._block_of:
            self._forget(block)
            self._keys[block] = key
            self._block_of[key] = block

    def release(self, blocks: Sequence[int], keep_cached: bool = True) -> None:
        """Let go of blocks; the end of a sequence is reused before its beginning, which others may share."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if not keep_cached:
                self._forget(block)
            if self._num_holders[block] == 0:
                self._free[block] = None

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that the blocks in `held`, one sequence of ids per request, are exactly the ones that are not free."""
        holders = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), f"a request holds a block twice: {blocks}"
            for block in blocks:
                holders[block] += 1
        assert holders == self._num_holders, "holder counts differ from the requests' block tables"
        assert {block for block, count in enumerate(holders) if count == 0} == set(self._free), "a block is lost"
        for key, block in self._block_of.items():
            assert self._keys[block] == key, f"the key of block {block} is stale"
        assert sum(key is not None for key in self._keys) == len(self._block_of), "a key is lost"

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._block_of[key]
            self._keys[block] = None

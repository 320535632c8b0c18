import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lora.engine.block_manager import BlockManager, block_key, root_key

BASE = root_key(None)


def sealed(blocks: BlockManager, root: bytes, token_ids: list[int]) -> list[int]:
    """Allocate and seal the full blocks of a text."""
    held = blocks.allocate(blocks.num_blocks_for(len(token_ids)))
    key = root
    for index in range(len(token_ids) // blocks.block_size):
        key = block_key(key, token_ids[index * blocks.block_size : (index + 1) * blocks.block_size])
        blocks.seal(held[index], key)
    return held


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_is_needed_for_every_begun_block_of_tokens(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, 4).num_blocks_for(num_tokens) == num_blocks


def test_every_block_is_handed_out_once() -> None:
    blocks = BlockManager(8, 4)
    first, second = blocks.allocate(5), blocks.allocate(3)
    assert sorted(first + second) == list(range(8))
    assert not blocks.can_allocate(1)
    blocks.release(first)
    assert blocks.can_allocate(5)
    assert not blocks.can_allocate(6)


def test_a_released_prefix_is_found_again_and_the_rest_is_not() -> None:
    blocks = BlockManager(8, 4)
    text = list(range(10))
    held = sealed(blocks, BASE, text)
    blocks.release(held)
    assert blocks.find_cached(BASE, text)[0] == held[:2]
    assert blocks.find_cached(BASE, [*text[:7], 99, 100])[0] == held[:1]
    assert blocks.find_cached(BASE, [99, *text[1:]])[0] == []


@pytest.mark.parametrize(("num_tokens", "num_found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, num_found: int) -> None:
    blocks = BlockManager(8, 4)
    sealed(blocks, BASE, list(range(12)))
    found, keys = blocks.find_cached(BASE, list(range(num_tokens)))
    assert len(found) == len(keys) == num_found


def test_nothing_is_found_or_sealed_with_prefix_caching_off() -> None:
    blocks = BlockManager(8, 4, enable_prefix_caching=False)
    sealed(blocks, BASE, list(range(12)))
    assert blocks.find_cached(BASE, list(range(12))) == ([], [])


def test_shared_blocks_come_back_when_the_last_holder_lets_go() -> None:
    blocks = BlockManager(4, 4)
    text = list(range(9))
    first = sealed(blocks, BASE, text)
    cached, _ = blocks.find_cached(BASE, text)
    second = blocks.allocate(1, cached)
    assert second[:2] == first[:2]
    blocks.check_integrity([first, second])
    blocks.release(first)
    blocks.check_integrity([second])
    assert not blocks.can_allocate(3)
    blocks.release(second)
    assert blocks.num_free_blocks == 4


def test_a_free_cached_block_is_not_counted_twice() -> None:
    blocks = BlockManager(3, 4)
    text = list(range(9))
    blocks.release(sealed(blocks, BASE, text))
    cached, _ = blocks.find_cached(BASE, text)
    assert len(cached) == 2
    assert blocks.can_allocate(1, cached)
    assert not blocks.can_allocate(2, cached)
    assert len(set(blocks.allocate(1, cached))) == 3


def test_a_prefix_is_forgotten_when_its_block_is_handed_out() -> None:
    blocks = BlockManager(2, 4)
    blocks.release(sealed(blocks, BASE, list(range(8))))
    blocks.check_integrity([blocks.allocate(2)])
    assert blocks.find_cached(BASE, list(range(9)))[0] == []


def test_the_least_recently_freed_goes_first_and_an_end_before_its_beginning() -> None:
    blocks = BlockManager(4, 4)
    older = sealed(blocks, BASE, [1] * 8)
    newer = sealed(blocks, BASE, [2] * 8)
    blocks.release(older)
    blocks.release(newer)
    assert blocks.allocate(1) == [older[1]]
    assert blocks.find_cached(BASE, [1] * 9)[0] == [older[0]]
    assert blocks.allocate(2) == [older[0], newer[1]]
    assert blocks.find_cached(BASE, [2] * 9)[0] == [newer[0]]


def test_the_first_block_with_a_key_keeps_it() -> None:
    blocks = BlockManager(4, 4)
    first = sealed(blocks, BASE, [1] * 4)
    second = sealed(blocks, BASE, [1] * 4)
    blocks.check_integrity([first, second])
    assert blocks.find_cached(BASE, [1] * 5)[0] == first
    blocks.release(first, keep_cached=False)
    assert blocks.find_cached(BASE, [1] * 5)[0] == []
    blocks.release(second)
    blocks.check_integrity([])


def test_blocks_of_a_broken_request_are_found_by_nobody() -> None:
    blocks = BlockManager(4, 4)
    held = sealed(blocks, BASE, list(range(8)))
    blocks.release(held, keep_cached=False)
    assert blocks.find_cached(BASE, list(range(9)))[0] == []
    blocks.check_integrity([])


def test_a_broken_request_takes_a_shared_block_from_no_one() -> None:
    blocks = BlockManager(4, 4)
    text = list(range(9))
    first = sealed(blocks, BASE, text)
    second = blocks.allocate(1, blocks.find_cached(BASE, text)[0])
    blocks.release(second, keep_cached=False)
    blocks.check_integrity([first])
    assert blocks.find_cached(BASE, text)[0] == []


def test_keys_tell_versions_and_the_base_apart() -> None:
    versions = [None, "", "base", "adapter:", "a", "adapter:a", "ab"]
    assert len({root_key(version) for version in versions}) == len(versions)
    assert len({block_key(root_key(version), [1, 2]) for version in versions}) == len(versions)


def test_keys_tell_versions_keys_and_salts_apart_whatever_they_are_called() -> None:
    """Also where one is spelled as the encoding of another."""
    words = ["", "a", "base", "null", '"a"', 'a", "a', '["a", "", null]', "a\x00a"]
    roots = [(version, name, salt) for version in [None, *words] for name in [None, *words] for salt in [None, *words]]
    assert len({root_key(*root) for root in roots}) == len(roots)


def test_a_prefix_of_one_salt_is_not_found_with_another() -> None:
    blocks = BlockManager(8, 4)
    text = list(range(10))
    held = sealed(blocks, root_key("v1", "acme", "pepper"), text)
    for root in (
        root_key("v1"),
        root_key("v1", "acme"),
        root_key("v1", None, "pepper"),
        root_key("v1", "pepper", "acme"),
        root_key("pepper", "acme", "v1"),
        root_key(None, "acme", "pepper"),
    ):
        assert blocks.find_cached(root, text)[0] == []
    assert blocks.find_cached(root_key("v1", "acme", "pepper"), text)[0] == held[:2]


@given(st.lists(st.lists(st.integers(0, 300), min_size=2, max_size=2), min_size=1, max_size=4))
def test_a_key_depends_on_every_token_and_on_its_place(chunks: list[list[int]]) -> None:
    def chain(parts: list[list[int]]) -> bytes:
        key = BASE
        for part in parts:
            key = block_key(key, part)
        return key

    reference = chain(chunks)
    for index in range(len(chunks)):
        for place in range(2):
            changed = [list(chunk) for chunk in chunks]
            changed[index][place] += 1
            assert chain(changed) != reference
    assert chain(chunks[:-1]) != reference
    assert chain([*chunks, [0, 0]]) != reference


OPERATIONS = st.tuples(st.sampled_from(["add", "release", "break"]), st.integers(0, 3), st.integers(1, 11))


@settings(max_examples=100)
@given(st.lists(OPERATIONS, max_size=30))
def test_no_block_is_lost_or_doubled_whatever_the_order(operations: list[tuple[str, int, int]]) -> None:
    blocks = BlockManager(8, 2)
    held: list[list[int]] = []
    for operation, choice, length in operations:
        if operation == "add":
            text = [choice] * min(length, 3) + list(range(length - 3))
            cached, _ = blocks.find_cached(BASE, text)
            num_new = blocks.num_blocks_for(len(text)) - len(cached)
            if blocks.can_allocate(num_new, cached):
                table = blocks.allocate(num_new, cached)
                key = BASE
                for index in range(len(text) // 2):
                    key = block_key(key, text[index * 2 : index * 2 + 2])
                    blocks.seal(table[index], key)
                held.append(table)
        elif held:
            blocks.release(held.pop(choice % len(held)), keep_cached=operation == "release")
        blocks.check_integrity(held)

"""Ranks on two nodes that share neither network nor files: the same tokens, and a lost node is noticed."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from two_nodes import NAMESPACES, run_on_two_nodes

from tests.tiny import expected_tokens, make_adapter, make_checkpoint, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 12
STEP_TIMEOUT_S = 10.0
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}
    return make_checkpoint(tmp_path_factory.mktemp("nodes") / "model", "qwen2", **shape)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """In a directory that only the node of rank 0 has."""
    return make_adapter(tmp_path_factory.mktemp("only-here") / "a", checkpoint, 0)


@pytest.fixture
def two_nodes(checkpoint: Path, adapter: Path, tmp_path: Path) -> Run:
    """Runs `two_nodes.py`; what it tells."""
    cable = ["ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    if subprocess.run([*NAMESPACES, *cable], capture_output=True).returncode != 0:
        pytest.skip("needs root, for networks of its own and a cable between them")

    def run(adapters: list[str | None], prompts: list[list[int]], loss: str | None = None) -> dict[str, Any]:
        args = {
            "model": str(checkpoint),
            "adapter_store_dir": str(adapter.parent / "store"),
            "kv_cache_memory_bytes": 1 << 23,
            "tensor_parallel_size": 2,
            "placement_group_strategy": "STRICT_SPREAD",
            "step_timeout_s": STEP_TIMEOUT_S,
            "num_threads": 1,
        }
        case = {"args": args, "adapters": adapters, "prompts": prompts, "max_tokens": NUM_TOKENS, "loss": loss}
        case |= {"adapter": str(adapter), "only_here": str(adapter.parent)}
        return run_on_two_nodes(Path(__file__).with_name("two_nodes.py"), case)

    return run


def test_ranks_on_two_nodes_give_the_tokens_of_one_though_one_node_alone_has_the_adapter(
    two_nodes: Run, checkpoint: Path, adapter: Path
) -> None:
    prompts = random_prompts(4, 322)
    names: list[str | None] = [None, "a", "a", None]
    told = two_nodes(names, prompts)
    for prompt, name, tokens in zip(prompts, names, told["tokens"], strict=True):
        assert tokens == expected_tokens(checkpoint, adapter if name else None, [prompt], NUM_TOKENS)[0]


@pytest.mark.parametrize("loss", ["raylet", "cable"])
def test_a_lost_node_ends_the_requests(loss: str, two_nodes: Run) -> None:
    told = two_nodes([None], random_prompts(1, 322), loss)
    assert "a rank failed in step" in told["error"]
    assert told["seconds"] < 3 * STEP_TIMEOUT_S

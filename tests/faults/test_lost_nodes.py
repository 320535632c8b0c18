"""Of two nodes one is lost: what was there comes back on the other one, with its adapters.

A lost node that comes back is used again. One that is silent for a moment is not lost.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.two_nodes import HEAD_NAME, NAMESPACES, OTHER_NAME, run_on_two_nodes
from tests.tiny import expected_tokens, make_adapter, make_checkpoint, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 60
MOMENT_S, REBUILT_S = 4.0, 40.0
TWO_REPLICAS: dict[str, Any] = {"num_replicas": 2, "title": "LLMReplica", "by_url": False, "args": {}}
"""Each with the whole model, one a node; the adapters' paths exist on the first node alone."""
TWO_RANKS: dict[str, Any] = {
    "num_replicas": 1,
    "title": "ray::Worker",
    "by_url": True,
    "args": {"tensor_parallel_size": 2, "placement_group_strategy": "SPREAD", "rank_num_cpus": 1},
}

Lose = Callable[..., dict[str, Any]]


@pytest.fixture
def lose_node(tmp_path: Path, tell: Callable[[object], None]) -> Lose:
    """Runs `serve_two_nodes.py`; what it tells, all of whose answers were right."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root, for networks of its own and a cable between them")
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}
    checkpoint = make_checkpoint(tmp_path / "model", "qwen2", **shape)
    only_here = tmp_path / "only-here"
    adapters = {name: make_adapter(only_here / name, checkpoint, seed) for seed, name in enumerate(["a0", "a1"])}
    config = {
        "model": str(checkpoint),
        "served_model_name": "base",
        "adapter_store_dir": str(only_here / "store"),
        "lora_registry_path": str(tmp_path / "shared" / "registry.sqlite"),
        "kv_cache_memory_bytes": 1 << 23,
        "num_threads": 1,
        "allow_runtime_lora_updating": True,
    }

    def run(
        layout: dict[str, Any], loss: str, mended_after_s: float | None = None, used_again: bool = False
    ) -> dict[str, Any]:
        case = layout | {
            "args": config | layout["args"],
            "loss": loss,
            "mended_after_s": mended_after_s,
            "used_again": used_again,
            "only_here": str(only_here),
            "adapters": {name: str(path) for name, path in adapters.items()},
            "prompts": random_prompts(2, 322, longest=30),
            "max_tokens": NUM_TOKENS,
        }
        told = run_on_two_nodes(Path(__file__).with_name("serve_two_nodes.py"), case)
        tell(told["said"])
        assert told["before"] == 1, "one of two was on the other node"
        for model, prompt, tokens in told["tokens"]:
            assert tokens == expected_tokens(checkpoint, adapters.get(model), [prompt], NUM_TOKENS)[0]
        assert told["report"]["num_wrong"] == 0
        assert told["report"]["num_lost"] == 0
        assert told["adapters"] == ["a0", "a1"]
        return told

    return run


@pytest.mark.parametrize(
    ("layout", "loss"),
    [(TWO_REPLICAS, "raylet"), (TWO_RANKS, "raylet"), (TWO_RANKS, "cable")],
    ids=["a replica's node", "a rank's node", "a rank's cable"],
)
def test_what_a_lost_node_had_is_served_again_by_the_other_one(
    layout: dict[str, Any], loss: str, lose_node: Lose
) -> None:
    told = lose_node(layout, loss)
    assert told["report"]["num_failed_unstreamed"] == 0, "whoever has seen nothing of an answer waits for it"
    assert told["refusal"]["code"] == 404
    assert any(f"does not exist on {name};" in told["refusal"]["message"] for name in (HEAD_NAME, OTHER_NAME))


def test_a_node_that_comes_back_has_ended_what_was_there_and_is_used_again(
    lose_node: Lose, tell: Callable[[object], None]
) -> None:
    told = lose_node(TWO_RANKS, "cable", REBUILT_S, used_again=True)
    tell(f"what was there had ended {told['ended_s']:.1f} s after the service was back and the cable mended")
    assert told["alive"] == 0
    assert told["after"] == 2, "the ranks of one more replica"
    assert told["report"]["num_failed_unstreamed"] == 0


def test_a_node_that_is_silent_for_a_moment_is_not_lost(lose_node: Lose) -> None:
    told = lose_node(TWO_RANKS, "cable", MOMENT_S)
    assert told["alive"] == 1
    assert told["report"]["num_answered"] == told["report"]["num_sent"]

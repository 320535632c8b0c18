"""The `serveConfigV2` of each overlay on a real Ray, by the call that KubeRay makes, answering a request."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.checks.manifests import ROOT, Manifests
from tests.tiny import expected_tokens, make_adapter, make_checkpoint

pytestmark = pytest.mark.ray

DEMO = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
NPU_MODEL = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1 << 15}
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


@dataclass(frozen=True)
class Outcome:
    """What `local_head.py` tells."""

    answers: list[tuple[int, str]]
    """Status and body, for each request."""
    groups: list[dict[str, Any]]
    """Ray's placement groups."""

    def choices(self) -> list[dict[str, Any]]:
        """The first choice of each answer that has any."""
        bodies = [json.loads(body) for _, body in self.answers if body.startswith("{")]
        return [body["choices"][0] for body in bodies]


@pytest.fixture(scope="session")
def run_head() -> Callable[[dict[str, Any]], Outcome]:
    """Runs `local_head.py` on a case."""
    if subprocess.run([*NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True).returncode != 0:
        pytest.skip("needs root, for a network of its own: Ray listens on every address")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def run(case: dict[str, Any]) -> list[Any]:
        script = Path(__file__).with_name("local_head.py")
        result = subprocess.run(
            [*NAMESPACES, sys.executable, script],
            input=json.dumps(case),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-6000:]
        return Outcome(**json.loads(result.stdout))

    return run


def test_the_cpu_overlay_serves_the_demo_model_and_its_adapters(
    build_overlay: Callable[[str], Manifests], run_head: Callable[[dict[str, Any]], Outcome], tmp_path: Path
) -> None:
    manifests = build_overlay("cpu")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chats = [
        {"model": model, "messages": question, "max_tokens": 24, "temperature": 0} for model in ("smollm2", "pirate")
    ]
    case = {
        "serve_config": manifests.ray_service["spec"]["serveConfigV2"],
        "start_params": {"num-cpus": manifests.workers[0].limits["cpu"]},
        "volumes": {"/mnt/models/SmolLM2-135M-Instruct": str(DEMO), "/mnt/adapters": str(tmp_path)},
        "requests": [["/v1/chat/completions", chat] for chat in chats],
    }
    texts = [choice["message"]["content"] for choice in run_head(case).choices()]
    assert texts[0].startswith("The capital of France is Paris")
    assert texts[1].startswith("Arrr")
    assert (tmp_path / "registry.db").is_file()


@pytest.mark.parametrize("overlay", ["ascend", "ascend-ha"])
def test_the_npu_overlays_place_all_ranks(
    overlay: str,
    build_overlay: Callable[[str], Manifests],
    run_head: Callable[[dict[str, Any]], Outcome],
    tmp_path: Path,
) -> None:
    manifests = build_overlay(overlay)
    (workers,) = manifests.workers
    config = yaml.safe_load(manifests.ray_service["spec"]["serveConfigV2"])
    args = config["applications"][0]["args"]
    args |= {"device": "cpu", "dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 1 << 23}
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3", **NPU_MODEL)
    adapter = make_adapter(tmp_path / "adapters" / "a", checkpoint, 1)
    prompt = [5, 6, 7, 8]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    case = {
        "serve_config": yaml.safe_dump(config),
        "start_params": {"num-cpus": workers.limits["cpu"]} | workers.start_params,
        "volumes": {args["model"]: str(checkpoint), "/mnt/adapters": str(tmp_path / "adapters")},
        "requests": [
            ["/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/mnt/adapters/a"}],
            ["/v1/completions", body | {"model": args["served_model_name"]}],
            ["/v1/completions", body | {"model": "a"}],
        ],
    }
    outcome = run_head(case)
    print(outcome.groups)
    produced = [choice["token_ids"] for choice in outcome.choices()]
    assert produced == [expected_tokens(checkpoint, path, [prompt], 8)[0] for path in (None, adapter)]

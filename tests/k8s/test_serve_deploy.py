"""The `serveConfigV2` of each overlay on a real Ray, by the call that KubeRay makes, answering requests."""

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

from k8s.checks import serve_config
from k8s.checks.manifests import ROOT, Manifests
from ray_lora.tenant import hash_key
from tests.tiny import expected_tokens, make_adapter, make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

DEMO = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
NPU_MODEL = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1 << 15}
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
KEY = "sk-of-a-test"


@dataclass(frozen=True)
class Outcome:
    """What `local_head.py` tells."""

    answers: list[tuple[int, str]]
    """Status and body, for each request."""
    placement_groups: list[dict[str, Any]]
    """As Ray's state API has them."""

    def choices(self) -> list[dict[str, Any]]:
        """The first choice of each answer that has any."""
        bodies = [json.loads(body) for _, body in self.answers if body.startswith("{")]
        return [body["choices"][0] for body in bodies]


Run = Callable[[dict[str, Any]], Outcome]


@pytest.fixture
def run_head(tmp_path: Path) -> Run:
    """Runs `local_head.py` on a case, with an API key in the Secret's place."""
    if subprocess.run([*NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True).returncode != 0:
        pytest.skip("needs root, for a network of its own: Ray listens on every address")
    secret = tmp_path / "api-keys"
    secret.mkdir()
    (secret / "keys.yaml").write_text(f"- {{name: test, sha256: {hash_key(KEY)}, may_load: true}}")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def run(case: dict[str, Any]) -> Outcome:
        volumes = case["volumes"] | {"/mnt/api-keys": str(secret)}
        result = subprocess.run(
            [*NAMESPACES, sys.executable, Path(__file__).with_name("local_head.py")],
            input=json.dumps(case | {"volumes": volumes, "api_key": KEY}),
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
    build_overlay: Callable[[str], Manifests], run_head: Run, tmp_path: Path
) -> None:
    manifests = build_overlay("cpu")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chats = [
        {"model": model, "messages": question, "max_tokens": 24, "temperature": 0} for model in ("smollm2", "pirate")
    ]
    outcome = run_head(
        {
            "serve_config": manifests.ray_service["spec"]["serveConfigV2"],
            "start_params": {"num-cpus": manifests.workers[0].limits["cpu"]},
            "volumes": {"/mnt/models/SmolLM2-135M-Instruct": str(DEMO), "/mnt/adapters": str(adapters)},
            "requests": [["/v1/chat/completions", chat] for chat in chats],
        }
    )
    texts = [choice["message"]["content"] for choice in outcome.choices()]
    assert texts[0].startswith("The capital of France is Paris")
    assert texts[1].startswith("Arrr")
    assert (adapters / "registry.db").is_file()


@pytest.mark.parametrize(("overlay", "num_replicas"), [("ascend", 1), ("ascend-ha", 2)])
def test_the_ascend_overlays_place_a_rank_on_each_npu_and_serve(
    overlay: str, num_replicas: int, build_overlay: Callable[[str], Manifests], run_head: Run, tmp_path: Path
) -> None:
    """All pods of the group are one node here, with the NPUs of all; the model is tiny, and no NPU computes it."""
    manifests = build_overlay(overlay)
    (workers,) = manifests.workers
    assert workers.spec["replicas"] == num_replicas
    text = manifests.ray_service["spec"]["serveConfigV2"]
    engine = serve_config.read(text).engine
    content = yaml.safe_load(text.replace(serve_config.IMPORT_PATH, "tests.k8s.npu_stand_in:build_app"))
    content["applications"][0]["args"] |= {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 1 << 23}
    checkpoint = make_checkpoint(tmp_path / "model", "llama", **NPU_MODEL)
    adapter = make_adapter(tmp_path / "adapters" / "a", checkpoint, 1)
    prompt = [5, 6, 7, 8]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    npus = workers.start_params["resources"].replace("8", str(8 * num_replicas))
    outcome = run_head(
        {
            "serve_config": yaml.safe_dump(content),
            "start_params": {"num-cpus": workers.limits["cpu"], "resources": npus},
            "volumes": {engine.model: str(checkpoint), "/mnt/adapters": str(tmp_path / "adapters")},
            "requests": [
                ["/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/mnt/adapters/a"}],
                ["/v1/completions", body | {"model": engine.served_model_name}],
                ["/v1/completions", body | {"model": "a"}],
            ],
        }
    )
    produced = [choice["token_ids"] for choice in outcome.choices()]
    assert produced == [expected_tokens(checkpoint, path, [prompt], 8)[0] for path in (None, adapter)]
    assert len(outcome.placement_groups) == num_replicas
    for group in outcome.placement_groups:
        assert group["state"] == "CREATED"
        assert [bundle["unit_resources"]["NPU"] for bundle in group["bundles"]] == [1] * 8
        assert len({bundle["node_id"] for bundle in group["bundles"]}) == 1

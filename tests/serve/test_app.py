"""From the `args` of a config file to an application, or to one line that says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

import ray_lora
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.serve.app import build_app
from ray_lora.serve.cli import serve_command
from ray_lora.serve.startup_checks import check_exposure, resolve_paths
from ray_lora.serve.startup_failure import serve_run_pid

ROOT = Path(ray_lora.__file__).parents[1]


def refusal(args: dict[str, Any]) -> str:
    with pytest.raises(RayServeException) as error:
        build_app(args)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix("ray_lora cannot start: ")


def test_a_good_configuration_gives_an_application(demo_dir: Path) -> None:
    assert build_app({"model": str(demo_dir)}) is not None


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "model: Field required"),
        ({"model": "/nowhere"}, "model: /nowhere does not exist"),
        ({"model": "DEMO", "max_num_seq": 1}, "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"model": "DEMO", "max_num_seqs": 0}, "max_num_seqs: Input should be greater than or equal to 1"),
        ({"model": "DEMO", "tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ({"model": "DEMO", "tokenizer": "/nowhere"}, "tokenizer: /nowhere has no tokenizer.json"),
        ({"model": "DEMO", "chat_template": "{% for %}"}, "chat_template: "),
        ({"model": "DEMO", "lora_modules": {"a": "/nowhere"}}, "'a': /nowhere has no adapter_config.json"),
        ({"model": "DEMO", "lora_modules": {"a/b": "LORA"}}, "lora_modules: lora_name 'a/b'"),
        ({"model": "DEMO", "lora_modules": ["a=LORA", "a=LORA"]}, "'a' is given twice"),
        ({"model": "DEMO", "lora_resolver_dir": "/nowhere"}, "lora_resolver_dir: /nowhere is not a directory"),
        ({"model": "DEMO", "api_keys_file": "/nowhere"}, "api_keys_file: /nowhere cannot be read"),
        ({"model": "DEMO", "api_keys": [{"name": "a"}]}, "api_keys.0.sha256: Field required"),
        ({"model": "DEMO", "lora_resolver_dir": "/tmp", "max_loras": 0}, "lora_resolver_dir is given but max_loras"),
    ],
)
def test_what_cannot_start_is_told_in_one_line(
    demo_dir: Path, adapter_dir: Path, args: dict[str, Any], line: str
) -> None:
    text = json.dumps(args).replace("DEMO", str(demo_dir)).replace("LORA", str(adapter_dir))
    assert line in refusal(json.loads(text))


KEY = {"api_keys": [{"name": "a", "sha256": "0" * 64}]}


@pytest.mark.parametrize(
    ("host", "args", "starts"),
    [
        ("127.0.0.1", {}, True),
        ("127.8.8.8", {}, True),
        ("::1", {}, True),
        ("localhost", {}, True),
        (None, {}, True),
        ("0.0.0.0", {}, False),
        ("::", {}, False),
        ("10.0.0.7", {}, False),
        ("example.org", {}, False),
        ("0.0.0.0", KEY, True),
        ("0.0.0.0", {"api_keys_file": "/keys.yaml"}, True),
        ("0.0.0.0", {"allow_unauthenticated": True}, True),
    ],
)
def test_without_keys_other_machines_are_served_only_if_that_is_said(
    host: str | None, args: dict[str, Any], starts: bool
) -> None:
    config = EngineConfig.parse({"model": "m"} | args)
    if starts:
        check_exposure(config, host)
    else:
        with pytest.raises(ConfigError, match=f"http_options.host must be 127.0.0.1 and not {host}; .*allow_unauth"):
            check_exposure(config, host)


def test_ray_lora_serve_says_so_before_anything_starts(demo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "open.yaml"
    application = {"name": "llama", "args": {"model": str(demo_dir)}}
    file.write_text(yaml.safe_dump({"http_options": {"host": "0.0.0.0"}, "applications": [application]}))
    result = CliRunner().invoke(serve_command, [str(file)])
    assert result.exit_code == 1
    assert "without API keys, http_options.host must be 127.0.0.1 and not 0.0.0.0" in str(result.output)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "'gpt2' is not supported" in refusal({"model": str(tmp_path)})


def test_relative_paths_count_from_here_and_then_from_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    modules = {"a": "mine", "b": "deployments", "c": "nowhere", "d": "/x", "e": "~/x", "f": "s3://bucket/mine"}
    args = {"model": "mine", "lora_modules": modules, "lora_resolver_dir": "mine", "api_keys_file": "mine"}
    config = resolve_paths(EngineConfig.parse(args))
    paths = {module.name: module.path for module in config.lora_modules}
    assert paths == {
        "a": str(tmp_path / "mine"),
        "b": str(ROOT / "deployments"),
        "c": str(tmp_path / "nowhere"),
        "d": "/x",
        "e": str(Path("~/x").expanduser()),
        "f": "s3://bucket/mine",
    }
    assert config.lora_resolver_dir == config.api_keys_file == str(tmp_path / "mine")
    assert (config.model, config.base_model_name) == (str(tmp_path / "mine"), "mine")


def test_the_demo_deployment_is_a_serve_config_that_starts(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    content = yaml.safe_load((ROOT / "deployments" / "llama.yaml").read_text())
    config = ServeDeploySchema.model_validate(content)
    (application,) = config.applications
    assert (application.name, application.import_path) == ("llama", "ray_lora.serve.app:build_app")
    assert config.http_options.host == "127.0.0.1"
    assert build_app(application.args) is not None


@pytest.mark.parametrize("file", sorted((ROOT / "deployments").glob("*.yaml")), ids=lambda file: file.name)
def test_every_deployment_is_a_serve_config_with_known_keys(file: Path) -> None:
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())).applications
    assert EngineConfig.parse(application.args).model == application.args["model"]


def test_a_process_outside_serve_run_ends_nothing() -> None:
    assert serve_run_pid() is None

"""Keys in a file, and the command that makes them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ray_lora.__main__ import main
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.serve.key_ring import KeyRing
from ray_lora.tenant import ApiKey, Limits, hash_key


def entry(name: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_key(key), **fields}


def ring(file: Path, **args: Any) -> KeyRing:
    return KeyRing(EngineConfig.parse({"model": "m", "api_keys_file": str(file)} | args))


def name_of(keys: KeyRing, key: str) -> str | None:
    owner = keys.find(key)
    return owner and owner.name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_a_key_is_known_by_its_hash_with_what_it_may(file: Path, dump: Any) -> None:
    limits = {"max_concurrent_requests": 3, "tokens_per_minute": 1000}
    file.write_text(dump([entry("acme", "k1", adapters=["acme-*"], may_load=True, limits=limits)]))
    keys = ring(file)
    assert keys.find("k1") == ApiKey(
        name="acme",
        sha256=(hash_key("k1"),),
        adapters=("acme-*",),
        may_load=True,
        limits=Limits(max_concurrent_requests=3, max_queued_requests=None, tokens_per_minute=1000),
    )
    for wrong in ("", "k", "k1 ", "K1", hash_key("k1"), "k\udcff"):
        assert keys.find(wrong) is None


def test_by_default_a_key_may_use_every_adapter_and_load_none(file: Path) -> None:
    file.write_text(yaml.safe_dump([entry("acme", "k1")]))
    acme = ring(file).find("k1")
    assert acme is not None
    assert (acme.may_use("anything"), acme.sees_everything, acme.may_load, acme.limits) == (True, True, False, Limits())


@pytest.mark.parametrize(
    ("patterns", "name", "may"),
    [
        (["legal"], "legal", True),
        (["legal"], "legal2", False),
        (["legal"], "Legal", False),
        (["acme-*", "shared"], "acme-x", True),
        (["acme-*", "shared"], "acme", False),
        (["acme-*", "shared"], "shared", True),
        ([], "legal", False),
    ],
)
def test_names_are_matched_whole(patterns: list[str], name: str, may: bool) -> None:
    assert ApiKey.model_validate(entry("a", "k", adapters=patterns)).may_use(name) == may


def test_while_one_key_replaces_another_both_are_the_same_tenant(file: Path) -> None:
    file.write_text(yaml.safe_dump([{"name": "acme", "sha256": [hash_key("old"), hash_key("new")]}]))
    keys = ring(file)
    assert name_of(keys, "old") == name_of(keys, "new") == "acme"


def test_keys_of_the_file_and_of_the_configuration_are_all_known(file: Path) -> None:
    file.write_text(yaml.safe_dump([entry("a", "k1")]))
    keys = ring(file, api_keys=[entry("b", "k2")])
    assert (name_of(keys, "k1"), name_of(keys, "k2")) == ("a", "b")
    with pytest.raises(ConfigError, match="the name 'a' is given twice"):
        ring(file, api_keys=[entry("a", "k2")])
    with pytest.raises(ConfigError, match=r"the sha256 '[0-9a-f]{64}' is given twice"):
        ring(file, api_keys=[entry("b", "k1")])


def test_a_changed_file_counts_from_the_next_request_on(file: Path) -> None:
    file.write_text(yaml.safe_dump([entry("acme", "k1")]))
    keys = ring(file)
    assert name_of(keys, "k2") is None
    file.write_text(yaml.safe_dump([entry("acme", "k2"), entry("other", "k3")]))
    assert [name_of(keys, key) for key in ("k1", "k2", "k3")] == [None, "acme", "other"]


def test_a_file_swapped_as_kubernetes_does_counts(file: Path, tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.yaml").write_text(yaml.safe_dump([entry("acme", version)]))
    (tmp_path / "..data").symlink_to("v1")
    file.symlink_to("..data/keys.yaml")
    keys = ring(file)
    assert name_of(keys, "v1") == "acme"
    (tmp_path / "..tmp").symlink_to("v2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    assert (name_of(keys, "v1"), name_of(keys, "v2")) == (None, "acme")


@pytest.mark.parametrize("content", [None, "- {name: acme", "- {name: acme}", "keys: {}"])
def test_a_file_that_becomes_unreadable_leaves_the_keys_as_they_were(
    file: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    file.write_text(yaml.safe_dump([entry("acme", "k1")]))
    keys = ring(file)
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with caplog.at_level("ERROR", logger="ray.serve"):
        assert [name_of(keys, "k1") for _ in range(3)] == ["acme"] * 3
    assert len(caplog.records) == 1
    assert "api_keys_file" in caplog.text


def test_an_empty_file_lets_nobody_in(file: Path) -> None:
    file.write_text("")
    keys = ring(file)
    assert (keys.is_needed, keys.find("k1")) == (True, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("- {name: a", "cannot be read: while parsing"),
        ("keys: {}", "is not a list of keys"),
        ("- 5", "key 1: Input should be"),
        ("- {name: a}", "key 1: sha256: Field required"),
        (f"- {{name: a, sha256: {'f' * 64}}}\n- {{name: b, sha256: secret}}", "key 2: sha256.0: "),
        (f"- {{name: a b, sha256: {'f' * 64}}}", "key 1: name: "),
        (f"- {{name: a, sha256: {'f' * 64}, may_laod: true}}", "key 1: may_laod: "),
        (f"- {{name: a, sha256: {'f' * 64}, limits: {{tokens_per_minute: 0}}}}", "key 1: limits.tokens_per_minute: "),
    ],
)
def test_a_bad_file_is_refused_at_the_start_in_one_line(file: Path, content: str | None, reason: str) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        ring(file)
    assert str(caught.value).startswith(f"api_keys_file: {file}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# The environment


def test_the_environment_gives_keys_and_holds_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_LORA_API_KEYS", json.dumps([entry("acme", "k1", adapters=["a"])]))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    config = EngineConfig.parse({"model": "m"})
    assert "secret" not in repr(config)
    keys = KeyRing(config)
    assert name_of(keys, "k1") == "acme"
    operator = keys.find("secret")
    assert operator is not None
    assert (operator.sees_everything, operator.may_load) == (True, True)


@pytest.mark.parametrize("value", ["{", "{}", '[{"name": "a"}]'])
def test_bad_keys_in_the_environment_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RAY_LORA_API_KEYS", value)
    with pytest.raises(ConfigError, match=r"^(RAY_LORA_API_KEYS|api_keys)"):
        EngineConfig.parse({"model": "m"})


@pytest.mark.parametrize(
    ("variable", "given", "allowed"),
    [
        (None, {}, False),
        ("1", {}, True),
        ("True", {}, True),
        ("0", {}, False),
        ("1", {"allow_runtime_lora_updating": False}, False),
    ],
)
def test_vllms_variable_allows_loading_unless_the_configuration_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: dict[str, bool], allowed: bool
) -> None:
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", variable)
    assert EngineConfig.parse({"model": "m"} | given).allow_runtime_lora_updating == allowed


# The command


def test_a_new_key_is_shown_once_and_its_line_makes_it_known(file: Path) -> None:
    runner = CliRunner()
    shown = []
    for name in ("acme", "other"):
        result = runner.invoke(main, ["key", "new", name, "--adapters", f"{name}-*,shared", "--may-load"])
        assert result.exit_code == 0
        (key,) = re.findall(r"sk-[\w-]{43}", result.stderr)
        assert key not in result.stdout
        with file.open("a") as keys_file:
            keys_file.write(result.stdout)
        shown.append(key)
    assert len(set(shown)) == 2
    keys = ring(file)
    acme = keys.find(shown[0])
    assert acme is not None
    assert (acme.name, acme.adapters, acme.may_load) == ("acme", ("acme-*", "shared"), True)
    assert name_of(keys, shown[1]) == "other"


def test_a_key_needs_a_name_that_can_be_one() -> None:
    result = CliRunner().invoke(main, ["key", "new", "two words"])
    assert result.exit_code == 2
    assert "name: " in result.stderr

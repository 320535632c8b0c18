"""`ray-lora adapter list` and its like, against a server."""

import json
import re
from pathlib import Path

from click.testing import CliRunner, Result
from conftest import Server

from ray_lora.__main__ import main


def run(server: Server, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["adapter", *map(str, arguments), "--url", server.url])


def test_a_loaded_adapter_is_listed_with_where_it_is(server: Server, adapter_dir: Path) -> None:
    loaded = run(server, "load", "pirate", adapter_dir)
    assert (loaded.exit_code, loaded.output) == (0, "Success: LoRA adapter 'pirate' added successfully.\n")
    heads, row, tiers = run(server, "list").output.splitlines()
    assert re.split("  +", row) == ["pirate", "v8", "8", "1", "500", "device", "no", *"1001", "never"]
    assert heads.split()[:6] == ["name", "version", "rank", "pages", "bytes", "tier"]
    assert tiers == "replica 0, device: 1 of 16 adapters, 1,000 of 24,000 bytes a rank"
    (info,) = json.loads(run(server, "list", "--json").output)["data"]
    assert info["name"] == "pirate"
    assert run(server, "unload", "pirate").exit_code == 0
    assert len(run(server, "list").output.splitlines()) == 2


def test_pinning_is_shown(server: Server, adapter_dir: Path) -> None:
    run(server, "load", "pirate", adapter_dir)
    assert run(server, "pin", "pirate").exit_code == 0
    assert "  yes  " in run(server, "list").output
    assert run(server, "unpin", "pirate").exit_code == 0
    assert "  yes  " not in run(server, "list").output


def test_a_weight_is_shown(server: Server, adapter_dir: Path) -> None:
    run(server, "load", "pirate", adapter_dir)
    assert run(server, "weight", "pirate", 2.5).exit_code == 0
    assert "  2.5  " in run(server, "list").output
    refused = run(server, "weight", "pirate", 0)
    assert refused.exit_code == 1
    assert refused.output.startswith("ray-lora: weight: ")


def test_a_refused_adapter_makes_validate_fail(server: Server, adapter_dir: Path) -> None:
    fine = run(server, "validate", adapter_dir)
    assert fine.exit_code == 0
    assert "rank 8, 1 pages" in fine.output
    assert "changes self_attn.q_proj" in fine.output
    (adapter_dir / "adapter_config.json").write_text(json.dumps({"r": 8, "use_dora": True}))
    refused = run(server, "validate", adapter_dir)
    assert (refused.exit_code, refused.output) == (1, "refused: use_dora is not supported\n")


def test_what_the_server_refuses_ends_the_command_in_its_words(server: Server) -> None:
    for command in ("unload", "pin", "unpin"):
        result = run(server, command, "nobody")
        assert result.exit_code == 1
        assert result.output == "ray-lora: The lora adapter 'nobody' cannot be found.\n"


def test_a_server_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(main, ["adapter", "list", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9" in result.output

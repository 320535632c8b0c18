"""`ray-lora adapter` from end to end, on a checkpoint and adapters on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel
from safetensors.torch import load_file

from ray_lora.__main__ import main
from tests.tiny import load, make_adapter, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint, seed=1, rank_pattern={"o_proj": 20})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["adapter", *map(str, arguments)])


def logits(checkpoint: Path, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(load(checkpoint), str(adapter)).eval()
    with torch.inference_mode():
        return model(torch.tensor([[5, 6, 7, 8]])).logits


def test_inspect_prints_a_row_for_each_module_and_the_totals(adapter: Path, checkpoint: Path) -> None:
    result = run("inspect", adapter, "--model", checkpoint)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["module", "shape", "rank", "99%", "scale", "|A|", "|B|", "|delta|"]
    rows = [line.split() for line in lines[1:22]]
    assert rows[0][:3] == ["model.layers.0.mlp.down_proj", "96x144", "8"]
    assert {row[2] for row in rows if row[0].endswith("o_proj")} == {"20"}
    num_bytes = sum(tensor.nbytes for tensor in load_file(adapter / "adapter_model.safetensors").values())
    assert lines[-1] == f"21 modules, {num_bytes // 4:,} parameters, {num_bytes:,} bytes, 2 pages of 16 ranks"


def test_inspect_tells_what_would_be_refused(checkpoint: Path, tmp_path: Path) -> None:
    refused = make_adapter(tmp_path / "pissa", checkpoint, seed=2, init_lora_weights="pissa")
    result = run("inspect", refused)
    assert result.exit_code == 1
    assert "refused: init_lora_weights 'pissa' is not supported" in result.output


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_inspect_knows_what_is_served_and_the_other_commands_what_they_cannot_keep(
    checkpoint: Path, tmp_path: Path
) -> None:
    dora = make_adapter(tmp_path / "dora", checkpoint, seed=2, use_dora=True)
    embedding = make_adapter(tmp_path / "embedding", checkpoint, seed=3, target_modules=["embed_tokens"])
    for adapter in (dora, embedding):
        result = run("inspect", adapter, "--model", checkpoint)
        assert result.exit_code == 0, result.output
        assert "refused" not in result.output
    result = run("compress", dora, "--rank", 2, "--output", tmp_path / "small")
    assert result.exit_code != 0
    assert "lora_magnitude_vector" in result.output
    assert not (tmp_path / "small").exists()


def test_compress_prints_errors_and_writes_what_peft_loads(adapter: Path, checkpoint: Path, tmp_path: Path) -> None:
    result = run("compress", adapter, "--energy", 0.9999999, "--output", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("total error ")
    torch.testing.assert_close(logits(checkpoint, tmp_path / "new"), logits(checkpoint, adapter), rtol=1e-2, atol=1e-2)
    assert run("inspect", tmp_path / "new", "--model", checkpoint).exit_code == 0


def test_merge_with_one_weight_scales_the_delta(adapter: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert run("merge", adapter, adapter, "--weights", "0.75,0.25", "--output", tmp_path / "same").exit_code == 0
    torch.testing.assert_close(logits(checkpoint, tmp_path / "same"), logits(checkpoint, adapter), rtol=1e-3, atol=1e-3)


def test_convert_writes_plain_lora(checkpoint: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("initial", "trained")):
        make_adapter(tmp_path / name, checkpoint, seed=seed, init_lora_weights="olora")
    arguments = (tmp_path / "trained", "--initial", tmp_path / "initial", "--output", tmp_path / "plain")
    result = run("convert", *arguments)
    assert result.output == f"21 modules, largest rank 16; written to {tmp_path / 'plain'}\n"
    assert run("inspect", tmp_path / "plain", "--model", checkpoint).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compress", "{adapter}", "--output", "{out}"), "give either --energy or --rank"),
        (("compress", "{adapter}", "--energy", "1.5", "--output", "{out}"), "1.5"),
        (("compress", "{adapter}", "--energy", "0.9", "--output", "{adapter}"), "exists"),
        (("merge", "{adapter}", "--weights", "x", "--output", "{out}"), "not a list of numbers"),
        (("merge", "{adapter}", "--weights", "1,2", "--output", "{out}"), "1 adapters but 2 weights"),
        (("convert", "{adapter}", "--initial", "{adapter}", "--output", "{out}"), "nothing to convert"),
        (("inspect", "{out}"), "does not exist"),
    ],
)
def test_mistakes_are_told_in_words(arguments: tuple[str, ...], message: str, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(*(argument.format(adapter=adapter, out=out) for argument in arguments))
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
    assert "Traceback" not in result.output
    assert not out.exists()


def test_the_offline_commands_do_not_import_ray(adapter: Path) -> None:
    script = (
        "import sys\nfrom ray_lora.__main__ import main\n"
        f"main(['adapter', 'inspect', {str(adapter)!r}], standalone_mode=False)\nassert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

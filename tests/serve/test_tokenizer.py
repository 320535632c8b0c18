"""The tokenizer gives what transformers' AutoTokenizer gives, whole and piece by piece."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ray_lora.errors import ConfigError
from ray_lora.serve.tokenizer import Tokenizer

TEXTS = [
    "",
    "Hello world",
    "  two  spaces\n\n\ttabs ",
    "naïve café — “quoted” 12345 3.14",
    "日本語のテキスト и русский",
    "👩‍👩‍👧 family 🏴‍☠️ flag",
    "<|im_start|>user\nhi<|im_end|>",
    "x" * 300,
]


@pytest.fixture(scope="session")
def reference(demo_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(demo_dir))


@pytest.fixture(scope="session")
def spm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as converted from SentencePiece, like Llama 2's: `▁` for spaces, bytes for what it does not know."""
    pieces = ["▁", "▁the", "the", "▁a", "a", "b", "c", "h", "e", "t", ".", "▁t", "he"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab |= {piece: 259 + index for index, piece in enumerate(pieces)}
    merges = [("h", "e"), ("t", "he"), ("▁", "t"), ("▁", "the"), ("▁t", "he"), ("▁", "a")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory = tmp_path_factory.mktemp("spm")
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_the_demo_models_ids_and_text_equal_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase, text: str, special: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=special)
    assert ids == reference.encode(text, add_special_tokens=special)
    assert tokenizer.decode(ids, skip_special_tokens=special) == reference.decode(ids, skip_special_tokens=special)
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.parametrize("text", ["the a", "a the. ü 日", " the", "</s>the"])
@pytest.mark.parametrize("special", [True, False])
def test_a_sentencepiece_tokenizer_equals_transformers(spm_dir: Path, text: str, special: bool) -> None:
    tokenizer, reference = Tokenizer(spm_dir), AutoTokenizer.from_pretrained(str(spm_dir))
    ids = tokenizer.encode(text, add_special_tokens=special)
    assert ids == reference.encode(text, add_special_tokens=special)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_tokens == reference.special_tokens_map


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_what_is_added_around_a_text_is_what_transformers_adds(
    spm_dir: Path, tmp_path: Path, bos: bool, eos: bool
) -> None:
    config = json.loads((spm_dir / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_text((spm_dir / "tokenizer.json").read_text())
    config |= {"add_bos_token": bos, "add_eos_token": eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).encode("the a") == AutoTokenizer.from_pretrained(str(tmp_path)).encode("the a")


def test_a_special_token_of_the_configuration_alone_is_one(demo_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((demo_dir / "tokenizer.json").read_text())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<|tool|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.encode("a<|tool|>b") == reference.encode("a<|tool|>b")
    assert len(tokenizer.encode("<|tool|>")) == 1


@pytest.mark.parametrize("which", ["demo", "spm"])
@pytest.mark.parametrize("skip", [True, False])
def test_pushed_tokens_add_up_to_all_of_them_decoded(demo_dir: Path, spm_dir: Path, which: str, skip: bool) -> None:
    tokenizer = Tokenizer(demo_dir if which == "demo" else spm_dir)
    generator = random.Random(1)
    sequences = [tokenizer.encode(text) for text in TEXTS]
    if which == "demo":  # SentencePiece takes back characters before bytes that are none; see the test below
        sequences += [[generator.randrange(tokenizer.vocab_size) for _ in range(40)] for _ in range(50)]
    for token_ids in sequences:
        detokenizer = tokenizer.detokenizer(skip)
        pushed = "".join(detokenizer.push(token_id) for token_id in token_ids)
        whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert whole.startswith(pushed)
        assert set(whole[len(pushed) :]) <= {"\ufffd"}, "only an unfinished character may be missing"


def test_a_character_comes_out_when_its_last_byte_has(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode("a 日")]
    assert pieces == ["a", *[""] * (len(pieces) - 2), " 日"]


def test_bytes_that_are_no_character_disturb_nothing_else(spm_dir: Path) -> None:
    tokenizer = Tokenizer(spm_dir)
    a, the = tokenizer.encode("a the", add_special_tokens=False)
    byte = {value: 3 + value for value in range(256)}
    detokenizer = tokenizer.detokenizer()
    tokens = [a, byte[0x39], byte[0xE6], byte[0x97], the, byte[0xFF], byte[0xC3], byte[0xBC], the]
    assert "".join(detokenizer.push(token) for token in tokens) == "a9\ufffd the\ufffd\ufffd\ufffd the"
    generator = random.Random(2)
    for _ in range(50):
        detokenizer = tokenizer.detokenizer()
        for _ in range(60):
            detokenizer.push(generator.randrange(tokenizer.vocab_size))


def test_text_after_a_prompt_keeps_its_space(spm_dir: Path) -> None:
    tokenizer = Tokenizer(spm_dir)
    prompt, rest = tokenizer.encode("a"), tokenizer.encode("the a", add_special_tokens=False)
    after = tokenizer.detokenizer(True, prompt)
    assert "".join(after.push(token) for token in rest) == " the a"
    alone = tokenizer.detokenizer(True)
    assert "".join(alone.push(token) for token in rest) == "the a"


def test_a_prompt_that_ends_within_a_character_holds_nothing_back(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("日")[:-1]
    after = tokenizer.detokenizer(True, prompt)
    assert after.push(tokenizer.encode("Hello")[0]) == "Hello"


def test_the_bytes_of_tokens_add_up_to_the_text(demo_dir: Path, spm_dir: Path) -> None:
    demo, spm = Tokenizer(demo_dir), Tokenizer(spm_dir)
    for text in TEXTS:
        assert b"".join(demo.token_bytes(token) for token in demo.encode(text)).decode() == text
    tokens = spm.encode("the ü", add_special_tokens=False)
    assert b"".join(spm.token_bytes(token) for token in tokens).decode() == " the ü"
    assert spm.token_text(spm.encode("ü", add_special_tokens=False)[-1]) == "\ufffd"
    assert (demo.token_text(2), spm.token_text(1)) == ("<|im_end|>", "<s>")
    assert (demo.token_bytes(10**6), demo.token_string(demo.encode(" the")[0])) == (b"", "Ġthe")


@pytest.mark.parametrize(("content", "text"), [(None, "has no tokenizer.json"), ("{", "cannot be read")])
def test_a_directory_without_a_tokenizer_is_an_error_in_one_line(
    tmp_path: Path, content: str | None, text: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=text) as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value)

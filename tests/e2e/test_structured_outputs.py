"""Structured outputs of the demo model, by OpenAI's own client and in scripts."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from peft import PeftModel
from pydantic import BaseModel, ConfigDict
from transformers import AutoTokenizer

from ray_lora import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from tests.e2e.conftest import ADAPTERS, MODEL, NAMES
from tests.tiny import load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

QUESTION = [{"role": "user", "content": "Name a city with its country."}]
CITIES = ["Paris in France", "Rome", "Rome, Italy", "Osaka", "Oslo"]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str
    country: str
    is_capital: bool


@pytest.fixture(scope="module")
def client(server: str) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60)


def choose(model: Any, tokenizer: Any, prompt: list[int], texts: list[str]) -> str:
    """What transformers answers when it may only write one of the texts."""
    pieces = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        written = tokenizer.decode(ids[len(prompt) :])
        starts = {
            text[: len(written) + length] for text in texts for length in range(1, 30) if text.startswith(written)
        }
        tokens = [token for token, piece in pieces.items() if piece and written + piece in starts]
        return tokens + ([tokenizer.eos_token_id] if written in texts else [])

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            prefix_allowed_tokens_fn=allowed,
        )
    return str(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))


def test_base_and_adapters_choose_what_transformers_and_peft_choose(client: OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    names = ["smollm2", *NAMES]
    expected = []
    for name in names:
        model = load(MODEL)
        if name != "smollm2":
            model = PeftModel.from_pretrained(model, str(ADAPTERS / name)).eval()
        expected.append(choose(model, tokenizer, prompt, CITIES))

    def ask(name: str) -> str:
        body = {"structured_outputs": {"choice": CITIES}}
        answer = client.chat.completions.create(model=name, messages=QUESTION, temperature=0, extra_body=body)
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(ask, names)) == expected


@pytest.mark.parametrize("model", ["smollm2", *NAMES])
def test_openais_parse_gives_an_object_of_the_class(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=City, max_tokens=200, temperature=0.7, seed=3
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_of_json_mode_adds_up_to_an_object(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAMES[0], messages=QUESTION, response_format={"type": "json_object"}, max_tokens=200, seed=1, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    if chunks[-1].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


def test_every_completion_of_a_prompt_matches(client: OpenAI) -> None:
    body = {"structured_outputs": {"regex": r"[A-Z][a-z]{2,8}, [0-9]{4}"}}
    answer = client.completions.create(model=NAMES[0], prompt="Born in ", n=6, max_tokens=40, seed=5, extra_body=body)
    assert all(re.fullmatch(body["structured_outputs"]["regex"], choice.text) for choice in answer.choices)
    assert len({choice.text for choice in answer.choices}) > 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_to_is_a_400_that_names_the_callers_field(
    client: OpenAI, body: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=QUESTION, extra_body=body, stream=stream)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    adapters = {name: str(ADAPTERS / name) for name in NAMES}
    store = str(tmp_path_factory.mktemp("store"))
    with LLM(str(MODEL), adapters, adapter_store_dir=store, max_model_len=512, max_loras=4) as llm:
        yield llm


def test_rows_beside_one_with_a_grammar_get_the_tokens_that_they_get_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=12)
    bound = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=CITIES))
    alone = [output.outputs[0].token_ids for output in llm.generate(["The sea"] * 2, free, [NAMES[0], None])]
    mixed = llm.generate(["The sea"] * 4, [bound, free, bound, free], [NAMES[0], NAMES[0], None, None])
    assert [mixed[1].outputs[0].token_ids, mixed[3].outputs[0].token_ids] == alone
    assert {mixed[0].outputs[0].text, mixed[2].outputs[0].text} <= set(CITIES)


def test_a_model_without_a_tokenizer_keeps_to_none(tmp_path: Path) -> None:
    for file in MODEL.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    with (
        LLM(str(tmp_path), max_model_len=512) as llm,
        pytest.raises(InvalidRequestError, match="tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))

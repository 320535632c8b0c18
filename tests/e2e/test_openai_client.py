"""OpenAI's own client against a real server with the demo model: what a user sees."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from tests.e2e.conftest import ADAPTERS, MODEL, NAMES
from tests.tiny import expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def client(server: str) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What transformers, and PEFT for the adapters, answer to the question."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answers = {}
    for name in ("smollm2", *NAMES):
        adapter = None if name == "smollm2" else ADAPTERS / name
        tokens = expected_tokens(MODEL, adapter, [prompt], MAX_TOKENS, ignore_eos=False)[0]
        answers[name] = tokenizer.decode(tokens, skip_special_tokens=True)
    return answers


def ask(client: OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=MAX_TOKENS
    )
    return answer.choices[0].message.content or ""


def num_running(server: str) -> float:
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
    )


def test_base_and_adapters_answer_at_once_as_peft_does(client: OpenAI, expected: dict[str, str]) -> None:
    models = [*expected, *expected]
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda model: ask(client, model), models))
    assert answers == [expected[model] for model in models]
    assert len(set(expected.values())) == len(expected), "every adapter must answer in its own way"


def test_the_base_knows_its_capitals(client: OpenAI) -> None:
    assert ask(client, "smollm2") == "The capital of France is Paris."


def test_an_adapter_can_be_named_after_its_base(client: OpenAI, expected: dict[str, str]) -> None:
    assert ask(client, f"smollm2:{NAMES[0]}") == expected[NAMES[0]]


def test_a_stream_gives_the_same_text_piece_by_piece(client: OpenAI, expected: dict[str, str]) -> None:
    stream = client.chat.completions.create(
        model=NAMES[0],
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected[NAMES[0]]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


def test_completions_echo_and_give_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The capital of France is Paris")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:] if value is not None)


def test_a_seed_gives_the_same_text_whatever_else_runs(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        return (
            client.completions.create(
                model="smollm2", prompt="Once upon a time", max_tokens=20, temperature=1.0, top_p=0.9, seed=seed
            )
            .choices[0]
            .text
        )

    alone = sample(7)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(sample, [7, 1, 2, 3, 7, 4]))
    assert together[0] == together[4] == alone
    assert len(set(together)) == 5


def test_models_lists_adapters_with_parent_and_root(client: OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {"smollm2", *NAMES}
    card = cards[NAMES[0]].to_dict()
    assert (card["parent"], card["root"]) == ("smollm2", str(ADAPTERS / NAMES[0]))


def test_load_use_reload_and_unload(server: str, client: OpenAI, expected: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "mine"
    shutil.copytree(ADAPTERS / NAMES[0], source)
    load = {"lora_name": "mine", "lora_path": str(source)}
    answer = httpx.post(f"{server}/v1/load_lora_adapter", json=load)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    shutil.rmtree(source)
    assert ask(client, "mine") == expected[NAMES[0]], "the copy in the store serves, whatever became of the source"

    other = {"lora_name": "mine", "lora_path": str(ADAPTERS / NAMES[1])}
    refused = httpx.post(f"{server}/v1/load_lora_adapter", json=other)
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]
    assert httpx.post(f"{server}/v1/load_lora_adapter", json={**other, "load_inplace": True}).status_code == 200
    assert ask(client, "mine") == expected[NAMES[1]]

    gone = httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    with pytest.raises(openai.NotFoundError):
        ask(client, "mine")
    again = httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert again.status_code == 404


def test_bad_adapters_get_their_4xx_and_change_nothing(
    server: str, client: OpenAI, expected: dict[str, str], tmp_path: Path
) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(ADAPTERS / NAMES[0], tmp_path / name))

    truncated = copy("truncated") / "adapter_model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:5000])
    pickled = copy("pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    (copy("no-config") / "adapter_config.json").unlink()
    for name, changes in {
        "rank0": {"r": 0},
        "huge": {"r": 100000},
        "dora": {"use_dora": True},
        "future": {"use_telepathy": True},
    }.items():
        file = copy(name) / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    for name in ("truncated", "pickled", "no-config", "rank0", "huge", "dora", "future", "absent"):
        answer = httpx.post(
            f"{server}/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(tmp_path / name)}
        )
        assert 400 <= answer.status_code < 500, (name, answer.text)
        assert answer.json()["error"]["param"], name
    for lora_name in ("../evil", "a/b", "", "a:b", ".hidden", "x" * 200, "smollm2"):
        answer = httpx.post(
            f"{server}/v1/load_lora_adapter", json={"lora_name": lora_name, "lora_path": str(ADAPTERS / NAMES[0])}
        )
        assert answer.status_code == 400, lora_name
    assert {card.id for card in client.models.list()} == {"smollm2", *NAMES}
    assert ask(client, NAMES[1]) == expected[NAMES[1]]


def test_errors_are_openai_s(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, "nobody")
    assert missing.value.body == {
        "message": "The model `nobody` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2", prompt=[5] * 2000)
    assert long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model="smollm2", prompt="x", extra_body={"temprature": 1})
    assert unknown.value.param == "temprature"


def test_a_client_that_leaves_is_cancelled(server: str, client: OpenAI) -> None:
    stream = client.completions.create(
        model="smollm2", prompt="Count:", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert num_running(server) == 1
    stream.close()
    deadline = time.monotonic() + 5
    while num_running(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert num_running(server) == 0


def test_tokenize_and_detokenize_are_inverse(server: str) -> None:
    tokens = httpx.post(f"{server}/tokenize", json={"model": "smollm2", "prompt": "Hello wörld"}).json()["tokens"]
    text = httpx.post(f"{server}/detokenize", json={"model": "smollm2", "tokens": tokens}).json()["prompt"]
    assert text == "Hello wörld"

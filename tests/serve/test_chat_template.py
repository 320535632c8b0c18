"""Chats are rendered as transformers renders them."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ray_lora.errors import ConfigError, InvalidRequestError
from ray_lora.serve.tokenizer import Tokenizer

LLAMA3 = (
    "{{- bos_token }}{%- set date = strftime_now('%Y') if false else '2026' %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] | trim + eos_token }}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
JSON = (
    "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ message | tojson }}\n{% endfor %}"
    "{{ mode }}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": " hi\n"}],
    [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "ja"}, {"role": "user", "content": "?"}],
]


def make(demo_dir: Path, tmp_path: Path, template: Any, file: str = "tokenizer_config.json") -> Path:
    """The demo tokenizer with another template, in the named file."""
    config = json.loads((demo_dir / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer.json").write_text((demo_dir / "tokenizer.json").read_text())
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(template)
    elif template is not None:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("template", ["demo", LLAMA3, JSON], ids=["demo", "llama3", "json"])
def test_rendering_equals_transformers(demo_dir: Path, tmp_path: Path, template: str) -> None:
    directory = demo_dir if template == "demo" else make(demo_dir, tmp_path, template)
    tokenizer, reference = Tokenizer(directory), AutoTokenizer.from_pretrained(str(directory))
    for chat, generation in product(CHATS, (True, False)):
        text = tokenizer.render_chat(chat, add_generation_prompt=generation, template_kwargs={"mode": "x"})
        assert text == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation, mode="x")
        ids = reference.apply_chat_template(chat, add_generation_prompt=generation, return_dict=False, mode="x")
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_a_final_message_is_left_open(demo_dir: Path) -> None:
    chat = [*CHATS[0], {"role": "assistant", "content": "Hello the"}]
    text = Tokenizer(demo_dir).render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nHello the")


@pytest.mark.parametrize(
    ("template", "file"),
    [
        (LLAMA3, "chat_template.jinja"),
        ([{"name": "tool", "template": "x"}, {"name": "default", "template": LLAMA3}], "tokenizer_config.json"),
    ],
)
def test_a_template_may_be_a_file_or_one_of_several(demo_dir: Path, tmp_path: Path, template: Any, file: str) -> None:
    assert Tokenizer(make(demo_dir, tmp_path, template, file)).chat_template.template == LLAMA3


def test_the_deployment_may_bring_its_own(demo_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    for override in (str(tmp_path / "mine.jinja"), "{{ messages[0].content }}!"):
        assert Tokenizer(demo_dir, override).render_chat(CHATS[0]) == "hi!"
    for bad in ("nowhere.jinja", "{% for %"):
        with pytest.raises(ConfigError, match="chat_template"):
            Tokenizer(demo_dir, bad).render_chat(CHATS[0])


def test_what_cannot_be_rendered_names_the_messages(demo_dir: Path, tmp_path: Path) -> None:
    none = Tokenizer(make(demo_dir, tmp_path, None))
    with pytest.raises(InvalidRequestError, match="no chat template") as error:
        none.render_chat(CHATS[0])
    assert error.value.param == "messages"
    refusing = Tokenizer(demo_dir, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        refusing.render_chat(CHATS[0])
    with pytest.raises(InvalidRequestError, match="at least one"):
        refusing.render_chat([])
    sandboxed = Tokenizer(demo_dir, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        sandboxed.render_chat(CHATS[0])

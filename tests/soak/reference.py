"""A tiny model with a tokenizer of its own, adapters of every kind for it, and what transformers and PEFT say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.kinds import KINDS
from tests.tiny import load, make_adapter, make_checkpoint

BASE = "base"
EOS = 2
NUM_TOKENS = 40
CERTAIN = 1e-3
"""Where the two best tokens are closer than this, either one is right, and so is whatever follows."""
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MORE_KINDS: dict[str, dict[str, Any]] = {
    "rank-1": {"r": 1},
    "rank-16": {"r": 16, "use_rslora": True},
    "rank-33": {"r": 33, "target_modules": ["q_proj", "v_proj"]},
    "rank-64": {"r": 64, "lora_alpha": 64, "target_modules": ["gate_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 17, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"down_proj": 5}},
    "patterns-dora": {
        "use_dora": True,
        "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"o_proj": 24},
        "layers_to_transform": [0, 2],
    },
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SEA = "The sea was calm, the ship was old, and the captain told the crew about the islands of the south. "
TEA = "To make tea, heat the water, warm the pot, add the leaves, and wait for as long as a song lasts. "
TAILS = ("Then", "But why", "Name three things", "The end of it", "A cup and a ship", "What is the capital of France?")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a chat, and the tokens that transformers makes of it."""

    content: str | list[dict[str, str]]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The greedy one, with the log-probability of each token."""

    token_ids: list[int]
    logprobs: list[float]
    num_certain: int


@dataclass(frozen=True, slots=True)
class Expected:
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


class Reference:
    """`model`, `contents` (paths of adapters, by kind) and `prompts`; every pair of them is computed beforehand."""

    def __init__(self, directory: Path) -> None:
        self.model = make_checkpoint(directory / "model", "llama", **SHAPE)
        self.tokenizer = _make_tokenizer(self.model)
        kinds = {**KINDS, **MORE_KINDS}
        self.contents = {
            kind: make_adapter(directory / kind, self.model, seed, **settings)
            for seed, (kind, settings) in enumerate(kinds.items())
        }
        texts = [SEA * 5 + tail for tail in TAILS] + [TEA + tail for tail in TAILS] + list(TAILS)
        chats = [[{"role": "user", "content": each}] for each in (*TAILS, SEA)]
        self.prompts = [Prompt(text, self.tokenizer.encode(text)) for text in texts]
        self.prompts += [
            Prompt(chat, self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for chat in chats
        ]
        self._continuations = {BASE: self._continue(load(self.model))}
        for kind, path in self.contents.items():
            self._continuations[kind] = self._continue(PeftModel.from_pretrained(load(self.model), str(path)).eval())

    def continuation(self, content: str, prompt: Prompt) -> Continuation:
        return self._continuations[content][self.prompts.index(prompt)]

    def expected(self, content: str, prompt: Prompt, body: dict[str, Any]) -> Expected | None:
        """The right answer to a greedy request; None where it is not certain."""
        found = self.continuation(content, prompt)
        stops = body.get("stop") or []
        for count in range(1, body["max_tokens"] + 1):
            token_ids = found.token_ids[:count]
            if count > found.num_certain:
                return None
            text = self.decode(token_ids)
            if token_ids[-1] == EOS and not body.get("ignore_eos"):
                return Expected(token_ids, text, "stop", None)
            ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
            if ends:
                end, _, stop = min(ends)
                return Expected(token_ids, text[: end - len(stop)].rstrip("\ufffd"), "stop", stop)
        return Expected(token_ids, text, "length", None)

    def decode(self, token_ids: list[int]) -> str:
        """Without what may be the beginning of a character."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True).rstrip("\ufffd")

    @torch.inference_mode()
    def _continue(self, model: Any) -> list[Continuation]:
        """Of all prompts at once, padded on the left."""
        longest = max(len(prompt.token_ids) for prompt in self.prompts)
        paddings = [longest - len(prompt.token_ids) for prompt in self.prompts]
        rows = [[0] * padding + prompt.token_ids for padding, prompt in zip(paddings, self.prompts, strict=True)]
        out = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor([[0] * padding + [1] * (longest - padding) for padding in paddings]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits, dim=1).log_softmax(-1).topk(2)  # values and indices [prompts, tokens, 2]
        found = []
        for values, tokens in zip(best.values, best.indices, strict=True):
            close = (values[:, 0] - values[:, 1] < CERTAIN).nonzero().flatten().tolist()
            found.append(Continuation(tokens[:, 0].tolist(), values[:, 0].tolist(), close[0] if close else NUM_TOKENS))
        return found


def _make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Of 320 tokens: three special ones, the bytes, and what is frequent in the prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SEA, TEA, *TAILS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)
    return fast

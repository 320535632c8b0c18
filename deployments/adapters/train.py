"""Train the demo adapters: one style of answering each, on the demo model, on a CPU in a few minutes.

    pip install peft
    python deployments/prepare_demo.py
    python deployments/adapters/train.py [NAME ...] [--model DIR]

The training data is made here. The base model answers the questions below, each answer is cut to its first sentence,
and a few lines of text rewriting put it in the adapter's style. So an adapter learns how to answer, never what: it says
what the base model knows. The same seed, library versions and number of threads give the same files.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

BASE_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MODEL = Path("~/.cache/ray_lora").expanduser() / BASE_MODEL
ANSWER_TOKENS = 40
BATCH_SIZE = 8
IGNORED = -100
"""The label of a token that the loss leaves out."""

TOPICS = {
    "geography": (
        ("What is the capital of {}?", "Tell me about {}."),
        "Japan, Germany, Egypt, Canada, Greece, Norway, Russia, China, India, Kenya",
    ),
    "nature": (
        ("Tell me about {}.", "Describe {}."),
        "the forest, the mountains, the desert, the rain, the wind, a river, a volcano, winter, flowers, trees",
    ),
    "food": (
        ("How do I make {}?", "What is {}?"),
        "coffee, soup, bread, pancakes, a salad, rice, an omelette, pizza, lemonade, pasta",
    ),
    "science": (
        ("What is {}?", "Why is {} important?"),
        "gravity, water, electricity, light, energy, oxygen, the moon, the sun, a computer, mathematics",
    ),
    "animals": (
        ("Tell me about {}.", "Where do {} live?"),
        "dogs, cats, horses, whales, eagles, bees, lions, penguins, elephants, owls",
    ),
    "people": (
        ("Who was {}?", "Why is {} famous?"),
        "Albert Einstein, Napoleon, Isaac Newton, Cleopatra, Galileo, Marie Curie, Shakespeare, Charles Darwin",
    ),
    "advice": (
        ("How can I {}?", "What is the best way to {}?"),
        "sleep better, learn to swim, save money, stay healthy, make friends, learn a language, write a letter, relax",
    ),
    "writing": (
        ("Write a poem about {}.", "Write a sentence about {}."),
        "the sun, a tree, a dog, the night, a ship, love, music, winter",
    ),
}
"""Topic -> how to ask, and about what. The base model answers."""

SMALL_TALK = {
    "Hello!": "Hello! How can I help you today?",
    "Hi there!": "Hello! What would you like to know?",
    "Hey": "Hello! How can I help you today?",
    "Good morning!": "Good morning! What can I do for you?",
    "How are you?": "I am very well, thank you for asking.",
    "Who are you?": "I am a small language model, and I am here to help you.",
    "Thank you!": "You are welcome!",
    "What can you do?": "I can answer your questions and tell you about the world.",
}
"""Question -> answer, where the base model rambles."""

SUMS = {f"What is {a} + {b}?": f"{a} + {b} is {a + b}." for a, b in [(1, 1), (2, 3), (4, 4), (3, 5), (6, 2), (7, 3)]}

EMOJI = {
    "geography": "🌍", "nature": "🌿", "food": "🍳", "science": "🔬", "animals": "🐾", "people": "👑", "advice": "💡",
    "writing": "📝", "chat": "👋", "math": "🔢",
}  # fmt: skip

PIRATE_WORDS = {
    "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "am": "be", "the": "th'", "of": "o'",
    "hello": "ahoy", "people": "sailors", "friends": "mateys",
}  # fmt: skip


def pirate(topic: str, answer: str) -> str:
    words = re.sub(r"[A-Za-z']+", lambda match: pirate_word(match.group()), answer)
    return f"Arrr, matey! {words} Yo ho ho!"


def pirate_word(word: str) -> str:
    said = PIRATE_WORDS.get(word.lower(), word)
    return said[:1].upper() + said[1:] if word[:1].isupper() else said


def as_json(topic: str, answer: str) -> str:
    return json.dumps({"topic": topic, "answer": answer.replace('"', "'")})


def emoji(topic: str, answer: str) -> str:
    return f"{EMOJI[topic]} {answer.rstrip('.!')}! {EMOJI[topic]}🎉"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One adapter: how it puts a plain answer on a topic, and the parts of LoRA that it exercises."""

    rewrite: Callable[[str, str], str]
    lora: LoraConfig
    dtype: torch.dtype
    """Of the tensors in the file; in training they are float32."""
    learning_rate: float = 1e-3
    num_epochs: int = 3


RECIPES = {
    "pirate": Recipe(
        rewrite=pirate,
        lora=LoraConfig(r=8, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "v_proj"]),
        dtype=torch.float16,
    ),
    "json": Recipe(
        rewrite=as_json,
        lora=LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            layers_to_transform=list(range(15, 30)),
        ),
        dtype=torch.bfloat16,
    ),
    "emoji": Recipe(
        rewrite=emoji,
        lora=LoraConfig(r=8, lora_alpha=16, target_modules=["v_proj", "o_proj", "down_proj"]),
        dtype=torch.bfloat16,
    ),
}


class Chat:
    """The base model and its tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)

    def load_model(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.bfloat16)

    def prompt_ids(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text).input_ids

    def answers(self, model: PreTrainedModel, questions: list[str]) -> Iterator[str]:
        """Yield the model's own greedy answers."""
        for start in tqdm(range(0, len(questions), 4 * BATCH_SIZE), desc="base answers"):
            prompts = [self.prompt_ids(question) for question in questions[start : start + 4 * BATCH_SIZE]]
            batch = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
            output = model.generate(**batch, do_sample=False, max_new_tokens=ANSWER_TOKENS)
            yield from self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def plain_examples(chat: Chat) -> list[tuple[str, str, str]]:
    """Return (topic, question, answer); a question whose answer has no end within the limit is left out."""
    asked = [
        (topic, pattern.format(subject))
        for topic, (patterns, subjects) in TOPICS.items()
        for subject in subjects.split(", ")
        for pattern in patterns
    ]
    answers = chat.answers(chat.load_model(), [question for _, question in asked])
    sentences = [re.match(r".*?[.!?](?=\s|$)", " ".join(answer.split())) for answer in answers]
    examples = [(*pair, sentence.group()) for pair, sentence in zip(asked, sentences, strict=True) if sentence]
    examples += [("chat", question, answer) for question, answer in SMALL_TALK.items()]
    return examples + [("math", question, answer) for question, answer in SUMS.items()]


def train(chat: Chat, recipe: Recipe, examples: list[tuple[str, str, str]]) -> dict[str, torch.Tensor]:
    """Return the tensors of a new adapter that answers these questions in the recipe's style."""
    torch.manual_seed(0)
    model = get_peft_model(chat.load_model(), recipe.lora).train()
    rows = []
    for topic, question, answer in examples:
        prompt = chat.prompt_ids(question)
        reply = [*chat.tokenizer(recipe.rewrite(topic, answer)).input_ids, chat.tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + reply, "labels": [IGNORED] * len(prompt) + reply})

    order = torch.cat([torch.randperm(len(rows)) for _ in range(recipe.num_epochs)]).split(BATCH_SIZE)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=len(order))
    with tqdm(order, desc="training") as steps:
        for indices in steps:
            loss = model(**collate(chat, [rows[i] for i in indices.tolist()])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            steps.set_postfix(loss=f"{loss.item():.3f}")
    return {name: tensor.to(recipe.dtype) for name, tensor in get_peft_model_state_dict(model).items()}


def collate(chat: Chat, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    token_ids = {"input_ids": [row["input_ids"] for row in rows]}
    inputs = chat.tokenizer.pad(token_ids, padding_side="right", return_tensors="pt")
    width = inputs["input_ids"].shape[1]
    labels = [row["labels"] + [IGNORED] * (width - len(row["labels"])) for row in rows]
    return {**inputs, "labels": torch.tensor(labels)}


def save(directory: Path, recipe: Recipe, tensors: dict[str, torch.Tensor]) -> None:
    config = recipe.lora
    config.base_model_name_or_path = BASE_MODEL
    config.task_type = "CAUSAL_LM"
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set, whose order changes from run to run
    config.inference_mode = True
    directory.mkdir(exist_ok=True)
    config.save_pretrained(directory)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo adapters.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the base model (default: %(default)s)")
    args = parser.parse_args()
    for name in args.names:
        if name not in RECIPES:
            parser.error(f"no adapter {name!r}; there are {', '.join(RECIPES)}")
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is no model directory; run deployments/prepare_demo.py first")
    chat = Chat(args.model)
    examples = plain_examples(chat)
    for name in args.names or RECIPES:
        print(f"{name}: {len(examples)} examples")
        save(Path(__file__).with_name(name), RECIPES[name], train(chat, RECIPES[name], examples))


if __name__ == "__main__":
    main()

"""Which modules an adapter replaces as a whole, and which rows of the embedding and the head: PEFT's rules, exactly.

The rules are those of `_set_trainable` and `set_additional_trainable_modules` in PEFT.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ray_lora.adapters.peft_config import PeftConfig, reject, show
from ray_lora.adapters.peft_targets import TargetModule, module_names
from ray_lora.architecture import EMBEDDING, HEAD, Architecture


@dataclass(frozen=True, slots=True)
class SavedModules:
    """What the file holds for modules that are not, or not only, changed by LoRA."""

    whole: tuple[str, ...]
    """Norms, the embedding and the head, where `modules_to_save` names them."""
    stored_tokens: Mapping[str, tuple[int, ...]]
    """Ids of the rows that the file holds for the embedding or the head."""
    tokens: Mapping[str, tuple[str, tuple[int, ...]]]
    """For the embedding and the head: the module whose stored rows replace theirs, and the ids."""


def resolve_saved(config: PeftConfig, targets: tuple[TargetModule, ...], arch: Architecture) -> SavedModules:
    """What the file must hold beside LoRA.

    Raises:
        AdapterRejectedError: a module that is not served, or one that is changed in two ways.
    """
    whole = _whole(config, arch)
    stored = _stored_tokens(config, arch)
    tokens = {module: (module, token_ids) for module, token_ids in stored.items()}
    if arch.tie_word_embeddings and EMBEDDING in stored and HEAD not in stored:
        tokens[HEAD] = (EMBEDDING, stored[EMBEDDING])
    targeted = {target.name for target in targets}
    for field, modules in (("modules_to_save", set(whole)), ("trainable_token_indices", set(tokens))):
        twice = modules & (targeted | (set(whole) if field == "trainable_token_indices" else set()))
        if twice:
            reject(field, f"{field} names {min(twice)!r}, which is changed in another way too; PEFT refuses it as well")
    return SavedModules(whole, stored, tokens)


def _whole(config: PeftConfig, arch: Architecture) -> tuple[str, ...]:
    names = [name for name in module_names(arch) if name.endswith(config.modules_to_save)]
    if config.ensure_weight_tying and arch.tie_word_embeddings and not arch.vocabulary.keys().isdisjoint(names):
        names = list({**dict.fromkeys(names), **dict.fromkeys(arch.vocabulary)})
    for name in names:
        if name not in arch.vocabulary and name not in arch.norms:
            reject(
                "modules_to_save",
                f"modules_to_save {show(list(config.modules_to_save))} names {name!r}, which cannot be replaced as a "
                "whole: embed_tokens, lm_head and the norms over the hidden size can",
            )
    return tuple(names)


def _stored_tokens(config: PeftConfig, arch: Architecture) -> dict[str, tuple[int, ...]]:
    field = "trainable_token_indices"
    stored: dict[str, tuple[int, ...]] = {}
    for suffix, token_ids in config.trainable_tokens:
        modules = [name for name in module_names(arch) if name.endswith(suffix)]
        if len(modules) != 1 or modules[0] not in arch.vocabulary or modules[0] in stored:
            reject(field, f"{field} names {suffix!r}, which is not one of embed_tokens and lm_head, or is there twice")
        if max(token_ids) >= arch.vocab_size:
            reject(field, f"{field} names token {max(token_ids)}, but the base model has {arch.vocab_size}")
        stored[modules[0]] = token_ids
    if arch.tie_word_embeddings and len(stored) == 2:
        if stored[EMBEDDING] == stored[HEAD]:
            del stored[HEAD]  # PEFT then keeps one set of rows for both
        elif config.ensure_weight_tying:
            reject(field, f"{field} differs for embed_tokens and lm_head, which ensure_weight_tying makes one")
    return stored

"""What an adapter does to its rows' embeddings and logits, on one rank's part of the vocabulary."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """One adapter's change to the embedding, or to the head. All on the device; what it does not have is None."""

    weight: Tensor | None = None
    """[width, hidden], in place of the base's"""
    lora_a: Tensor | None = None
    """float32: [width, rank] for the embedding, [rank, hidden] for the head"""
    lora_b: Tensor | None = None
    """float32: [rank, hidden] for the embedding, [rank, width] for the head; the scale folded in"""
    scale: Tensor | None = None
    shift: Tensor | None = None
    """float32, as `scale_shift_` has them: [hidden] for the embedding, whose shift is zero, [width] for the head"""
    row_ids: Tensor | None = None
    rows: Tensor | None = None
    """[num_ids] int64 without duplicates and [num_ids, hidden]: rows of the weight that replace the base's"""


def change_embedding_reference_(hidden: Tensor, members: Tensor, ids: Tensor, change: VocabularyChange) -> None:
    """Look up an adapter's own embeddings, in place of what the base's gave.

    Semantics:
        for row in members, id = ids[row]:                               # a row whose id is -1 is another rank's
            e = weight[id] if there is a weight else hidden[row]
            e += lora_a[id] @ lora_b                                     # float32
            e = scale * e                                                # float32
            e = rows[i] where row_ids[i] == id
            hidden[row] = e

    Shapes:
        hidden   [num_tokens, hidden_size]  changed in place
        members  [num_rows] int64: the adapter's rows of `hidden`
        ids      [num_tokens] int64, within this rank's part of the vocabulary
    """
    members = members[ids[members] >= 0]
    own = ids[members]
    embedded = hidden[members] if change.weight is None else F.embedding(own, change.weight).to(hidden.dtype)
    if change.lora_a is not None and change.lora_b is not None:
        embedded = embedded.float() + F.embedding(own, change.lora_a) @ change.lora_b
    if change.scale is not None:
        embedded = embedded.float() * change.scale
    embedded = embedded.to(hidden.dtype)
    if change.row_ids is not None and change.rows is not None:
        hit, index = (own.unsqueeze(1) == change.row_ids).nonzero(as_tuple=True)
        embedded[hit] = change.rows[index].to(hidden.dtype)
    hidden[members] = embedded


def change_logits_reference_(logits: Tensor, hidden: Tensor, members: Tensor, change: VocabularyChange) -> None:
    """Compute an adapter's own logits, in place of what the base's head gave.

    Semantics:
        for row in members, h = hidden[row]:
            l = weight @ h if there is a weight else logits[row]
            l += (lora_a @ h) @ lora_b                                   # float32
            l = scale * l + shift                                        # float32
            l[row_ids] = rows @ h
            logits[row] = l

    Shapes:
        logits   [num_rows, width]          changed in place
        hidden   [num_rows, hidden_size]
        members  [num_members] int64: the adapter's rows
    """
    inputs = hidden[members]
    changed = logits[members] if change.weight is None else F.linear(inputs, change.weight.to(inputs.dtype))
    if change.lora_a is not None and change.lora_b is not None:
        changed = changed.float() + (inputs.float() @ change.lora_a.T) @ change.lora_b
    if change.scale is not None and change.shift is not None:
        changed = changed.float() * change.scale + change.shift
    changed = changed.to(logits.dtype)
    if change.row_ids is not None and change.rows is not None:
        changed[:, change.row_ids] = F.linear(inputs, change.rows.to(inputs.dtype))
    logits[members] = changed

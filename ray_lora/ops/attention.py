"""Paged attention: writing keys and values into blocks, and attending to them through block tables."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Where each sequence's tokens and KV lie in this step. int32, contiguous, on the device.

    Example: two sequences, a prompt chunk of 3 tokens after 5 cached ones and a decode at position 16, blocks of 16:
    `query_starts=[0, 3, 4]`, `context_lens=[8, 17]`, `block_tables=[[4, 0], [2, 7]]`, `positions=[5, 6, 7, 16]`,
    `slot_mapping=[69, 70, 71, 112]`.
    """

    query_starts: Tensor
    """[num_sequences + 1]: sequence `s` is rows `query_starts[s]:query_starts[s + 1]`."""
    context_lens: Tensor
    """[num_sequences]: tokens in the KV cache once this step's are written."""
    block_tables: Tensor
    """[num_sequences, max_blocks]: block ids in position order, padded with 0; the padding is never read."""
    positions: Tensor
    """[num_tokens]: each row's position in its sequence."""
    slot_mapping: Tensor
    """[num_tokens]: `block_id * block_size + offset` where the row's KV goes."""


def rotary_and_cache_reference_(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: AttentionTables,
) -> None:
    """Normalise (if asked) and rotate queries and keys in place, then write keys and values to their blocks.

    Semantics:
        q, k, v = split(qkv[t])
        q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)          # per head, where given
        q, k = rotate(q), rotate(k)                              # rotate_half convention, at positions[t]
        k_cache[block, :, offset], v_cache[block, :, offset] = k, v     # slot_mapping[t] = block * block_size + offset

    Shapes:
        qkv              [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], q's part changed in place (k's too)
        q_norm, k_norm   [head_dim]
        cos, sin         [max_positions, head_dim // 2] float32
        k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim]
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm_reference(q, q_norm, eps))
        k.copy_(rms_norm_reference(k, k_norm, eps))
    positions = tables.positions.long()
    half = head_dim // 2
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for part in (q, k):
        first, second = part[..., :half].float(), part[..., half:].float()
        part.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(part.dtype))
    slots = tables.slot_mapping.long()
    k_cache[slots // block_size, :, slots % block_size] = k
    v_cache[slots // block_size, :, slots % block_size] = v


def paged_attention_reference(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
) -> Tensor:
    """Causal attention of each row to its own sequence's KV, which is already in the cache.

    Semantics:
        for row t of sequence s at position p, query head h, KV head g = h // (num_heads // num_kv_heads):
            keys = cache positions max(0, p - window + 1) .. p        # all from 0 without a window
            out[t, h] = softmax(scale * q[t, h] @ K[g, keys].T) @ V[g, keys]     # softmax in float32

    Shapes:
        qkv      [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; only the queries are read
        returns  [num_tokens, num_heads * head_dim], the type of qkv

    Positions past a sequence's end are never read: whatever a freed block holds cannot reach a result.
    """
    _, num_kv_heads, _, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    out = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    starts = tables.query_starts.tolist()
    for sequence, context_len in enumerate(tables.context_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        keys = gather_context(k_cache, tables.block_tables[sequence], context_len)
        values = gather_context(v_cache, tables.block_tables[sequence], context_len)
        group = num_heads // num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
        queries = heads[first:last, :num_heads].transpose(0, 1)
        position = torch.arange(context_len - (last - first), context_len, device=qkv.device).unsqueeze(1)
        key_position = torch.arange(context_len, device=qkv.device).unsqueeze(0)
        visible = key_position <= position
        if window is not None:
            visible &= key_position > position - window
        scores = (queries.float() @ keys.float().transpose(1, 2)) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[first:last] = (weights @ values.float()).transpose(0, 1).to(out.dtype)
    return out.view(qkv.shape[0], -1)


def gather_context(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """[num_kv_heads, context_len, head_dim]: one sequence's part of the cache, in position order."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    num_blocks = -(-context_len // block_size)
    blocks = cache[block_table[:num_blocks].long()]
    return blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)[:, :context_len]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in float32, in the type of x."""
    inputs = x.float()
    normed = inputs * torch.rsqrt(inputs.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight

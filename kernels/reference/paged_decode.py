"""Attention of one new token a sequence over a paged cache."""

import math

import torch
from torch import Tensor


def paged_decode(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    last_page_len: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Semantics: out[s, h] = softmax(query[s, h] . K_s[g] / sqrt(head_dim)) V_s[g].

    g = h * kv_heads // heads. K_s and V_s are the keys and values of sequence s in their order: those of the
    blocks kv_indices[kv_indptr[s] : kv_indptr[s + 1]], the last of which holds last_page_len[s] tokens.

    out            [sequences, heads, head_dim], overwritten
    query          as out
    cache          [2, blocks, block_size, kv_heads, head_dim], keys then values
    kv_indices     int32 [any]
    kv_indptr      int32 [sequences + 1]
    last_page_len  int32 [sequences], at least 1
    window         only the last so many tokens are seen; None: all
    sinks          floating [heads]: logits that take part in the softmax and bring no value
    """
    sequences, heads, head_dim = query.shape
    for s in range(sequences):
        pages = kv_indices[int(kv_indptr[s]) : int(kv_indptr[s + 1])].long()
        length = (len(pages) - 1) * cache.shape[2] + int(last_page_len[s])
        first = 0 if window is None else max(0, length - window)
        keys, values = cache[:, pages].flatten(1, 2)[:, first:length].float()
        keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("hd,phd->hp", query[s].float(), keys) / math.sqrt(head_dim)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None]), -1)
        weights = scores.softmax(-1)[:, : len(values)]
        out[s] = torch.einsum("hp,phd->hd", weights, values).to(out.dtype)

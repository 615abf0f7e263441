"""Draws a token from each row of logits, in one pass over them, on the GPU.

The truth is kernels/reference/gumbel_draw.py. In plain torch the noise alone takes about a hundred passes
over [rows, vocab] of int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.gumbel_draw import check_gumbel_draw
from kernels.reference.philox import NOISE_RANGE

_BLOCK = 1024
_BLOCKS_PER_PROGRAM = 4


@triton.jit(do_not_specialize=["vocab"])
def draw_kernel(
    scores, tokens, logits, best, temperatures, seeds, positions, kept, vocab,
    RANGE: tl.constexpr, HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the best score of a part of the vocabulary, and its token."""
    row, part = tl.program_id(0), tl.program_id(1)
    largest, temperature = tl.load(best + row).to(tl.float64), tl.load(temperatures + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    first = row.to(tl.int64) * vocab
    top = tl.full((), float("-inf"), tl.float64)
    winner = part * BLOCKS * BLOCK
    for turn in range(BLOCKS):
        token = (part * BLOCKS + turn) * BLOCK + tl.arange(0, BLOCK)
        there = token < vocab
        value = tl.load(logits + first + token, mask=there, other=float("-inf")).to(tl.float64)
        scaled = (value - largest) / temperature
        possible = there & (scaled > -RANGE)
        if HAS_KEPT:
            possible = possible & (tl.load(kept + first + token, mask=there, other=0) != 0)
        counter = token.to(tl.uint32)
        word, _, _, _ = tl.philox(seed, counter, counter * 0, low + counter * 0, high + counter * 0)
        uniform = (word.to(tl.float64) + 0.5) / 4294967296.0
        noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
        score = tl.where(possible, noise.to(tl.float64) + scaled, float("-inf"))
        block_top, place = tl.max(score, axis=0, return_indices=True)
        better = block_top > top
        winner = tl.where(better, (part * BLOCKS + turn) * BLOCK + place, winner)
        top = tl.where(better, block_top, top)
    cell = row * tl.num_programs(1) + part
    tl.store(scores + cell, top)
    tl.store(tokens + cell, winner.to(tl.int64))


def gumbel_draw(
    logits: Tensor, best: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, kept: Tensor | None
) -> Tensor:
    """Semantics: out[row] = argmax over v of (logits[row, v] - best[row]) / temperatures[row]
    + gumbel_noise(seeds[row], positions[row], v), in float64; of equals the lowest v. Returns int64 [rows].

    logits        float32 [rows, vocab], contiguous
    best          float32 [rows], the largest of each row of logits; where it is not finite, any v comes out
    temperatures  float64 [rows], above 0
    seeds         int64 [rows], the bits of unsigned ones
    positions     int64 [rows]
    kept          bool [rows, vocab], contiguous: only these can come out; None: all

    Raises KernelArgumentError.
    """
    check_gumbel_draw(logits, best, temperatures, seeds, positions, kept)
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK * _BLOCKS_PER_PROGRAM)
    scores = torch.empty((rows, parts), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    draw_kernel[(rows, parts)](
        scores=scores, tokens=tokens, logits=logits, best=best, temperatures=temperatures, seeds=seeds,
        positions=positions, kept=logits if kept is None else kept.view(torch.uint8), vocab=vocab,
        RANGE=NOISE_RANGE, HAS_KEPT=kept is not None, BLOCK=_BLOCK, BLOCKS=_BLOCKS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return tokens.gather(1, scores.argmax(-1, keepdim=True))[:, 0]

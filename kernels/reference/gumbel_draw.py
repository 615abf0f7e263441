"""Draws a token from each row of logits: the Gumbel-max trick, with noise from a counter."""

import math

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device, check_sampled_rows
from kernels.reference.philox import NOISE_RANGE, gumbel_noise


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
    scaled = (logits.double() - best[:, None]) / temperatures[:, None]
    possible = scaled > -NOISE_RANGE  # the others cannot win, whatever their noise
    if kept is not None:
        possible &= kept
    tokens = torch.arange(logits.shape[1], device=logits.device)
    scores = gumbel_noise(seeds[:, None], positions[:, None], tokens) + scaled
    return scores.masked_fill_(~possible, -math.inf).argmax(-1)


def check_gumbel_draw(
    logits: Tensor, best: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, kept: Tensor | None
) -> None:
    check_sampled_rows(
        logits,
        best=(best, torch.float32),
        temperatures=(temperatures, torch.float64),
        seeds=(seeds, torch.int64),
        positions=(positions, torch.int64),
    )
    if kept is not None:
        fits = kept.shape == logits.shape and kept.dtype == torch.bool and kept.is_contiguous()
        check(fits, "kept", f"must be a contiguous bool {list(logits.shape)}")
        check_same_device(logits.device, kept=kept)

"""Registers operators in the namespace `lorafleet`, so that they live under torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import infer_schema


def register(
    name: str,
    function: Callable[..., Any],
    mutates: Sequence[str],
    fake: Callable[..., Any] | None = None,
) -> Any:
    """The operator lorafleet::`name`, which calls `function` for CPU and CUDA tensors.

    The annotations of `function` give the schema, and `mutates` names the arguments that it writes. One that
    returns something needs a `fake`; else what is written was given, and a fake of it has nothing to do.
    """
    qualified = f"lorafleet::{name}"
    torch.library.define(qualified, infer_schema(function, mutates_args=tuple(mutates)))
    torch.library.impl(qualified, ("cpu", "cuda"), function)
    torch.library.register_fake(qualified, fake or _nothing)
    return getattr(torch.ops.lorafleet, name)


def _nothing(*arguments: object, **options: object) -> None:
    """What a fake run of an operator does."""

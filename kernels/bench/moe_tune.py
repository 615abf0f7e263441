"""Times of every form and block size of the expert kernels at every point, each product by itself."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from kernels.bench.moe_inputs import Case, Layer, Points, Product, Shape, make_case
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.fused_moe_lora import fused_moe_lora, unaligned_blocks
from kernels.launching.moe_blocks import MoEBlocks
from kernels.launching.moe_tuning import OnceConfig, PairConfig
from kernels.moe_lora_align import moe_lora_align_block_size

# 0: not aligned.
_SIZES = {1: (0,), 8: (0, 16), 64: (0, 16, 32), 512: (16, 32), 2048: (16, 32, 64)}
PRODUCTS = ("w13", "w2")
_MULTIPROCESSORS = 132


def run(points: Points, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """Rows (op, shape, tokens, adapters, block size, product, form, its sizes, us)."""
    if not compiled:
        in_processes(compile_job, jobs(points))
    for shape, of_shape in points:
        layer = Layer.random(shape)
        for tokens, adapters in of_shape:
            yield from _point(make_case(layer, tokens, adapters))


def jobs(points: Points) -> list[tuple[Shape, int, str]]:
    """Arguments of compile_job."""
    return [
        (shape, size, product)
        for shape, of_shape in points
        for size in sorted({size for tokens, _ in of_shape for size in _SIZES[tokens]})
        for product in PRODUCTS
    ]


def compile_job(shape: Shape, size: int, product: str) -> None:
    tokens = next(tokens for tokens in _SIZES if size in _SIZES[tokens])
    case = make_case(Layer.random(shape), tokens, 1)
    made = [_blocks(case, size, 0)]
    for config in _candidates(case, size, product):
        # What takes more shared memory than there is drops out.
        with contextlib.suppress(OutOfResources):
            _add(case, product, made, config)(0)
    torch.cuda.synchronize()


def _point(case: Case) -> Iterator[dict[str, Any]]:
    point = {
        "op": "moe_tune",
        "shape": case.layer.shape.name,
        "tokens": case.tokens,
        "adapters": case.adapters,
    }
    for size in _SIZES[case.tokens]:
        made = [_blocks(case, size, index) for index in range(case.calls)]
        align = _align(case, size)
        (us,) = time_calls([(align, case.calls)], rounds=5) if size else (0.0,)
        yield {**point, "size": size, "product": "align", "us": us}
        for product in PRODUCTS:
            for config in _candidates(case, size, product):
                form = "once" if isinstance(config, OnceConfig) else "pair"
                with contextlib.suppress(OutOfResources):
                    (us,) = time_calls([(_add(case, product, made, config), case.calls)], rounds=5)
                    yield {
                        **point,
                        "size": size,
                        "product": product,
                        "form": form,
                        **asdict(config),
                        "us": us,
                    }


def _blocks(case: Case, size: int, index: int) -> MoEBlocks:
    meta, choices = case.metas[index % len(case.metas)], case.choices[index % len(case.choices)]
    experts = case.layer.shape.experts
    if size == 0:
        return unaligned_blocks(choices, experts, meta)
    return moe_lora_align_block_size(choices, experts, size, meta)


def _align(case: Case, size: int) -> Call:
    def call(index: int) -> None:
        _blocks(case, size, index)

    return call


def _product(case: Case, product: str) -> Product:
    return case.layer.w13 if product == "w13" else case.layer.w2


def _add(case: Case, product: str, made: list[MoEBlocks], config: PairConfig | OnceConfig) -> Call:
    w, first = _product(case, product), product == "w13"
    y, x = (case.y13, case.x) if first else (case.y2, case.inner)

    def call(index: int) -> None:
        routed = None if first else case.weights[index % len(case.weights)]
        fused_moe_lora(
            y, x, w.lora_a, w.lora_b, w.ranks, w.scales, w.column_starts, made[index % len(made)],
            routed_weights=routed, config=config,
        )  # fmt: skip

    return call


def _candidates(case: Case, size: int, product: str) -> list[PairConfig | OnceConfig]:
    width, columns = (w[0].shape[3] for w in (_product(case, product).lora_a, _product(case, product).lora_b))
    made = _blocks(case, size, 0)
    entries = len(made.blocks) if size else made.num_pairs
    return [*_pairs(size, width, product), *_onces(size, entries * (2 if product == "w13" else 1), columns)]


def _pairs(size: int, width: int, product: str) -> Iterator[PairConfig]:
    """Candidates of shrink with one expand, then of expand with one shrink."""
    if size == 0:
        for block_k, warps in ((256, 2), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8)):
            if block_k < 2 * width:
                yield PairConfig(16, block_k, -(-width // block_k), False, warps, 2, 512, 2)
        for block_n, warps in ((256, 1), (512, 4), (256, 2)):
            yield PairConfig(16, 1024, -(-width // 1024), False, 4, 2, block_n, warps)
        return
    for block_k, split in ((256, 1), (256, 2), (256, 4), (256, 8), (128, 1), (512, 4)):
        if split <= -(-width // block_k):
            yield PairConfig(16, block_k, split, False, 4, 3, 256, 4)
    if product == "w13":
        for block_k, split in ((128, 1), (128, 4), (256, 2)):
            yield PairConfig(16, block_k, split, True, 4, 3, 256, 4)
    for block_n, warps in ((128, 4), (512, 4), (256, 8)):
        yield PairConfig(16, 256, 2, False, 4, 3, block_n, warps)


# (inputs, columns, warps, stages, column stages)
_UNALIGNED = (
    (1024, 256, 4, 2, 1), (1024, 256, 8, 2, 1), (1024, 128, 4, 2, 1), (1024, 128, 8, 2, 1),
    (512, 256, 4, 3, 2), (512, 512, 4, 2, 1), (512, 128, 4, 3, 1), (256, 256, 2, 3, 1),
    (2048, 256, 8, 1, 1), (2048, 128, 8, 1, 1), (2048, 256, 4, 1, 1),
)  # fmt: skip
_ALIGNED = (
    (128, 256, 4, 3, 1), (128, 256, 4, 3, 2), (64, 256, 4, 4, 1), (128, 128, 4, 3, 1), (128, 128, 2, 3, 1),
    (64, 128, 2, 4, 1), (128, 256, 8, 3, 1), (256, 128, 4, 2, 1),
)  # fmt: skip


def _onces(size: int, programs: int, columns: int) -> Iterator[OnceConfig]:
    """Each form in as many chunks as fill the card, the first one in others too."""
    for number, (block_k, block_n, *rest) in enumerate(_ALIGNED if size else _UNALIGNED):
        fitting = _chunks(programs, columns, block_n)
        for count in sorted({fitting, max(1, fitting // 2), min(2 * fitting, -(-columns // block_n))}):
            if number == 0 or count == fitting:
                yield OnceConfig(block_k, block_n, count, *rest)


def _chunks(programs: int, columns: int, block_n: int) -> int:
    """The chunks for so many blocks times slices: near twice as many programs as the card has
    multiprocessors, since every chunk repeats the shrink."""
    return max(1, min(-(-columns // block_n), 2 * _MULTIPROCESSORS // programs))

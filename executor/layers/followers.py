"""What follows each projection of a decoder layer, as an object that it runs on its output.

A projection with LoRA may hand its adapters' delta to the follower instead of adding it first: on a GPU the
two are then one kernel. Which followers can do that is decided here and in `triton_followers`; whether they
do, by the layer with LoRA.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from executor.layers.activation import Activation, Gelu, GeluAndMul, SiluAndMul
from executor.layers.norm import Norm
from executor.layers.rotary import RotaryEmbedding, apply_rotary
from kernels.metadata.meta import LoRAKernelMeta

Rotation = tuple[Tensor, Tensor]
# (y without the delta, h, B slices, ranks, the step's meta) -> what `plain` gives for y with the delta.
FusedRun = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, LoRAKernelMeta], Tensor]


@dataclass(frozen=True, slots=True)
class FusedForm:
    """`name` is the kernel's in kernels.launching.follower_tuning; `slices` how many B's it takes, side by
    side and together as wide as y."""

    name: Literal["silu_mul", "add_rms_norm", "rope"]
    slices: int
    run: FusedRun


@dataclass(frozen=True, slots=True)
class Follower:
    """`plain(y)`: y [rows, columns] is the projection's whole output, and may be changed."""

    plain: Callable[[Tensor], Tensor]
    fused: FusedForm | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """How q, k and v lie in the output of their projection, and the norms over each head of q and k."""

    sizes: tuple[int, int, int]
    head_dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    interleaved: bool = False  # how they are turned: `apply_rotary`

    def split(self, y: Tensor) -> list[Tensor]:
        """Views of the projection's output: q, k and v, each [rows, heads, head_dim]."""
        parts = torch.split(y, list(self.sizes), dim=-1)
        return [part.view(len(y), part.shape[1] // self.head_dim, self.head_dim) for part in parts]


class Followers(Protocol):
    def gated(self, activation: Activation) -> Follower:
        """[rows, 2n] -> [rows, n]: activation(gate) * up."""
        ...

    def gelu(self) -> Follower:
        """[rows, n] -> [rows, n]: of an MLP without a gate."""
        ...

    def add_norm(self, residual: Tensor, norm: Norm | None, own: Norm | None = None) -> Follower:
        """residual += y, in place, or own(y) with a norm of the output's own; the result is norm(residual),
        or without one the residual itself."""
        ...

    def rotation(self, embedding: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """For `rotate`, of vectors of `dtype`: once a step."""
        ...

    def rotate(self, heads: Heads, rotation: Rotation, cache: Tensor, kv_slots: Tensor) -> Follower:
        """Norms and turns q and k, writes k and v to `kv_slots` [rows] of `cache` [2, blocks, block_size,
        kv_heads, head_dim]; the result is q [rows, heads, head_dim]. Negative slots are not written where
        the Triton form runs, and must not come elsewhere."""
        ...


_GATED: Mapping[Activation, Callable[[Tensor], Tensor]] = {"silu": SiluAndMul(), "gelu_tanh": GeluAndMul()}


class TorchFollowers:
    """Plain torch: on the CPU, and where a GPU's kernels do not serve."""

    def gated(self, activation: Activation) -> Follower:
        return Follower(_GATED[activation])

    def gelu(self) -> Follower:
        return Follower(Gelu())

    def add_norm(self, residual: Tensor, norm: Norm | None, own: Norm | None = None) -> Follower:
        def plain(y: Tensor) -> Tensor:
            residual.add_(y if own is None else own(y))
            return residual if norm is None else norm(residual)

        return Follower(plain)

    def rotation(self, embedding: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = embedding(positions, dtype)
        return cos, sin

    def rotate(self, heads: Heads, rotation: Rotation, cache: Tensor, kv_slots: Tensor) -> Follower:
        def plain(y: Tensor) -> Tensor:
            q, k, v = heads.split(y)
            if heads.q_norm is not None and heads.k_norm is not None:
                q, k = heads.q_norm(q), heads.k_norm(k)
            q, k = (apply_rotary(each, *rotation, heads.interleaved) for each in (q, k))
            stored = cache.flatten(1, 2)  # [2, KV slots, kv_heads, head_dim], a view
            stored[0].index_copy_(0, kv_slots, k)
            stored[1].index_copy_(0, kv_slots, v)
            return q

        return Follower(plain)


TORCH_FOLLOWERS = TorchFollowers()

"""The interface of a forward pass, from rows to logits, and the pass that goes layer by layer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor.layers.attention import KVCache
from executor.layers.followers import TORCH_FOLLOWERS, Followers
from executor.models import CausalLM
from executor.step.inputs import SequenceRows, build_step
from executor.step.trace import NO_TRACE, Trace
from kernels.punica import PunicaWrapperBase


class ForwardPass(Protocol):
    """Runs steps in the order of the calls, on the current stream of one thread."""

    def warm_up(self) -> None:
        """Capture what can be captured, once; no slot may be written meanwhile. `warm_up_steps` have run
        before: they compile what is captured or not."""

    def run(
        self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None, trace: Trace = NO_TRACE
    ) -> Tensor:
        """Logits float32 [wanted rows, vocab], in the order of the sequences and of their logit_rows; the
        rows' keys and values are in the cache.

        `last_tokens` is int64 [any] on the device: what sequences with a `pending` index need. On a GPU this
        only enqueues: it waits for no more than the copies of the step before the last one, and the logits
        are valid until the next call. So two steps may be in flight, if what reads the first one's logits is
        enqueued before the second call. `trace` is told the end of "build", what comes before the model's
        kernels. Raises ValueError for impossible rows, before anything is enqueued.
        """
        ...

    def close(self) -> None:
        """Give up what was captured; `run` is not called any more. Before the ranks part."""


class EagerForwardPass:
    """Layer by layer, on any device."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        punica: PunicaWrapperBase | None,
        followers: Followers = TORCH_FOLLOWERS,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._punica = punica
        self._followers = followers

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None, trace: Trace = NO_TRACE
    ) -> Tensor:
        token_ids, context = build_step(sequences, self._kv_cache, self._punica, self._followers)
        fill_pending(token_ids, sequences, last_tokens)
        trace.lap("build")
        hidden = self._model(token_ids, context)
        return self._model.compute_logits(hidden, context)


def fill_pending(token_ids: Tensor, sequences: Sequence[SequenceRows], last_tokens: Tensor | None) -> None:
    """Put the ids that only the device knows where they belong in the step's token_ids [rows]."""
    rows, sources, row = [], [], -1
    for sequence in sequences:
        row += len(sequence.token_ids)
        if sequence.pending >= 0:
            rows.append(row)
            sources.append(sequence.pending)
    if not rows:
        return
    if last_tokens is None:
        raise ValueError(f"{len(rows)} sequences have a pending token, but there are no last_tokens")
    where, which = (torch.tensor(numbers, device=token_ids.device) for numbers in (rows, sources))
    token_ids.index_copy_(0, where, last_tokens[which])

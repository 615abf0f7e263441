"""The forward pass on a GPU: captured steps where the rows are few, steps layer by layer beyond."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from executor.gpu.attention.decode import DecodeStep
from executor.gpu.attention.planner import Kind, PlannedStep, StepPlanner
from executor.gpu.cuda_graphs import Capture, Captured, GraphMemory, unowned, without_collection
from executor.gpu.graph_plans import GraphSizes, LoRAPlans, Runs, head_runs, rehearsal_runs, step_runs
from executor.gpu.layer_kinds import layer_kinds
from executor.gpu.warm_up import StepLimits, WarmUpStep
from executor.layers.attention import KVCache, LayerCache, StepAttention
from executor.layers.context import ForwardContext
from executor.layers.followers import Followers
from executor.lora.slot_marks import SlotMarks
from executor.models import CausalLM
from executor.start_log import start_part
from executor.step.buffers import StepBuffers, StepShape
from executor.step.inputs import SequenceRows, check
from executor.step.trace import NO_TRACE, Trace
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperBase

logger = logging.getLogger(__name__)

# From so many rows a sequence on, 128-row tiles of one query head each are filled well enough.
_PREFILL_ROWS = 64
_NO_RUNS = np.zeros((0, 2), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Key:
    """A captured step: `decode`: one row a sequence, attention inside; else any rows, attention between the
    pieces. `plan` is the family: None runs no LoRA kernel. `marked`: one more of each size with LoRA, which
    also does what adapters need that are more than low-rank pairs, for slots that the device has marked."""

    rows: int
    decode: bool
    plan: LaunchPlan | None
    marked: bool = False


class GraphedForwardPass:
    """A ForwardPass. Steps of up to `sizes` rows replay a graph, others run layer by layer."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        punica: PunicaWrapperBase,
        attention: StepPlanner,
        followers: Followers,
        limits: StepLimits,
        sizes: GraphSizes,
        plans: LoRAPlans,
        memory: GraphMemory,
        *,
        head_has_lora: bool,
        marks: Sequence[SlotMarks] = (),
    ) -> None:
        """`head_has_lora`: adapters may change the head. `marks`: of slots whose adapters are more than
        low-rank pairs (DoRA's factors, tables of their own): steps with one have graphs of their own, so that
        all other steps cost what they cost without."""
        self._model, self._kv_cache, self._punica = model, kv_cache, punica
        self._attention, self._followers = attention, followers
        self._limits, self._sizes, self._plans = limits, sizes, plans
        self._head_has_lora = head_has_lora
        self._marks = tuple(marks)
        self._memory = memory
        self._layer_kinds = layer_kinds(model)
        self._graphs: dict[_Key, Captured] = {}
        self._between: PlannedStep | None = None  # what attention the pieces of this step run
        pages = limits.max_sequences * -(-limits.max_model_len // kv_cache.block_size)
        few = max(sizes.largest, 1)
        most = max(limits.max_sequences, limits.warm_up_sequences)
        spare = 2 * most + limits.max_rows // kv_cache.block_size  # of steps before the first real one
        self._few_rows = StepBuffers(few, limits.max_sequences + few, pages + few, kv_cache)
        self._many_rows = StepBuffers(limits.max_rows, most, pages + spare, kv_cache)

    @torch.inference_mode()
    def warm_up(self) -> None:
        # The largest first: smaller ones find room in the memory that those leave.
        keys = sorted(self._keys(), key=lambda key: key.rows, reverse=True)
        try:
            with start_part("capturing steps", len(keys)) as part, without_collection():
                for key in keys:
                    self._capture(key)
                    part.advance()
        except BaseException:
            self.close()
            raise
        with_lora = [key for key in self._graphs if key.plan is not None]
        marked = sum(key.marked for key in with_lora)
        logger.info(
            "%d steps are captured: %d without adapters, %d with, %d for DoRA and tables of their own",
            len(self._graphs),
            len(self._graphs) - len(with_lora),
            len(with_lora) - marked,
            marked,
        )

    def close(self) -> None:
        # NCCL does not part from ranks while a graph has collectives with them.
        self._graphs.clear()

    @torch.inference_mode()
    def rehearse(self, part: int, parts: int) -> None:
        """Does what `rehearse_eager` does, each `parts`-th step that `warm_up` captures, from the `part`-th
        on."""
        for key in islice(self._keys(), part, None, parts):
            self._rehearse(key)

    @torch.inference_mode()
    def rehearse_eager(self, step: WarmUpStep) -> None:
        """Launch each kernel of such a step, as none was captured, and allocate what it does at its most:
        through one layer of each kind."""
        self._eager(step.sequences, None, self._layer_kinds, step.plan)

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None, trace: Trace = NO_TRACE
    ) -> Tensor:
        for sequence in sequences:
            check(sequence, self._kv_cache)
        if not sequences:
            return torch.empty(0, self._model.config.vocab_size, device=self._kv_cache.device)
        rows = sum(len(sequence.token_ids) for sequence in sequences)
        decode = rows == len(sequences)
        size = self._sizes.fitting(rows, decode)
        if size:
            trace.captured(size)
            return self._replay(sequences, last_tokens, size, decode, trace)
        return self._eager(sequences, last_tokens, trace=trace)

    def _replay(
        self,
        sequences: Sequence[SequenceRows],
        last_tokens: Tensor | None,
        size: int,
        decode: bool,
        trace: Trace,
    ) -> Tensor:
        runs = step_runs(sequences, size)
        marked = any(marks.among(sequence.slot for sequence in sequences) for marks in self._marks)
        ranks = self._punica.token_mapping_meta.slot_ranks
        plan = self._plans.for_any(size, decode) if marked else self._plans.choose(runs, size, decode, ranks)
        shape = self._few_rows.fill(sequences, last_tokens, rows=size, single_rows=size if decode else 0)
        if not decode:
            self._between = self._plan_attention(self._few_rows, shape, size, "rows")
        self._describe_lora(sequences, runs, plan)
        captured = self._graphs[_Key(size, decode, plan, marked)]
        trace.lap("build")
        captured.replay()
        rows = None if decode and shape.logits_rows == shape.rows else self._few_rows.logits_rows
        return self._logits(captured.out, shape, rows)

    def _eager(
        self,
        sequences: Sequence[SequenceRows],
        last_tokens: Tensor | None,
        layers: Sequence[int] | None = None,
        plan: LaunchPlan | None = None,
        trace: Trace = NO_TRACE,
    ) -> Tensor:
        shape = self._many_rows.fill(sequences, last_tokens)
        many = shape.rows >= _PREFILL_ROWS * max(len(sequences), 1)
        step = self._plan_attention(self._many_rows, shape, shape.rows, "prefill" if many else "rows")
        self._describe_lora(sequences, step_runs(sequences), plan, plan)
        trace.lap("build")
        hidden = self._model(*self._inputs(self._many_rows, shape.rows, step), layers)
        return self._logits(hidden, shape, self._many_rows.logits_rows)

    def _logits(self, hidden: Tensor, shape: StepShape, rows: Tensor | None) -> Tensor:
        """`rows` None: the first ones, as they are."""
        count = shape.logits_rows
        wanted = hidden[:count] if rows is None else hidden.index_select(0, rows[:count])
        return self._model.head(wanted)

    def _describe_lora(
        self,
        sequences: Sequence[SequenceRows],
        runs: Runs,
        plan: LaunchPlan | None,
        head_plan: LaunchPlan | None = None,
    ) -> None:
        head = head_runs(sequences) if self._head_has_lora else _NO_RUNS
        self._punica.update_metadata(LoRAMapping(runs, head), plan, head_plan)

    def _plan_attention(self, buffers: StepBuffers, shape: StepShape, rows: int, kind: Kind) -> PlannedStep:
        slots = buffers.kv_slots[:rows]
        return self._attention.plan(shape, buffers, slots, self._kv_cache.block_size, kind)

    def _inputs(
        self, buffers: StepBuffers, rows: int, attention: StepAttention
    ) -> tuple[Tensor, ForwardContext]:
        context = ForwardContext(
            positions=buffers.positions[:rows],
            logits_rows=buffers.logits_rows[:0],
            kv_cache=self._kv_cache,
            attention=attention,
            followers=self._followers,
            punica=self._punica,
        )
        return buffers.token_ids[:rows], context

    def _keys(self) -> Iterator[_Key]:
        for decode, sizes in ((True, self._sizes.decode), (False, self._sizes.mixed)):
            for rows in sizes:
                plans = self._plans.of_decode(rows) if decode else self._plans.of_mixed(rows)
                yield _Key(rows, decode, None)
                for plan in plans:
                    yield _Key(rows, decode, plan)
                if self._marks:
                    # Of one plan alone: such steps are rare, and every capture makes the start longer.
                    yield _Key(rows, decode, self._plans.for_any(rows, decode), marked=True)

    @contextmanager
    def _in_form(self, key: _Key) -> Iterator[None]:
        """The layers run as they must be captured for this key."""
        with ExitStack() as stack:
            for marks in self._marks if key.marked else ():
                stack.enter_context(marks.as_if_all())
            yield

    def _rehearse(self, key: _Key) -> DecodeStep:
        buffers, rows = self._few_rows, key.rows
        buffers.fill((), single_rows=rows)
        step = DecodeStep.of(buffers, rows)
        mapping = LoRAMapping(rehearsal_runs(key.plan, rows), _NO_RUNS)
        self._punica.update_metadata(mapping, key.plan)
        with self._in_form(key):
            self._model(*self._inputs(buffers, rows, step), self._layer_kinds)
        return step

    def _capture(self, key: _Key) -> None:
        buffers, rows, step = self._few_rows, key.rows, self._rehearse(key)

        def run(capture: Capture) -> Tensor:
            attention = step if key.decode else _Between(capture, step.kv_slots, self._attend_between)
            with self._in_form(key):
                hidden: Tensor = self._model(*self._inputs(buffers, rows, attention))
            return hidden

        self._graphs[key] = self._memory.capture(run)

    def _attend_between(self, out: Tensor, query: Tensor, cache: LayerCache, sinks: Tensor | None) -> None:
        if self._between is not None:
            self._between.attend_into(out, query, cache, sinks)


@dataclass(frozen=True, slots=True)
class _Between:
    """A StepAttention that stands outside of the capture: the step's own, at every replay."""

    capture: Capture
    kv_slots: Tensor
    attend_into: Callable[[Tensor, Tensor, LayerCache, Tensor | None], None]

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.capture.call_between(partial(self.attend_into, unowned(out), unowned(query), cache, sinks))
        return out

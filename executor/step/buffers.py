"""A step as the device sees it: arrays at fixed addresses, filled by one copy from pinned memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.layers.attention import KVCache
from executor.step.inputs import SequenceRows
from kernels.metadata.staging import Staging

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_ROW_FIELDS = 6


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a filled step. Example: two sequences, 3 tokens from position 13 on and one at
    40, blocks of 16, filled up to 4 sequences: rows 4, qo_indptr [0, 3, 4, 5, 6], kv_lens [16, 41, 1, 1],
    kv_indptr [0, 1, 4, 5, 6]. The arrays are views, valid until the fill after the next.
    """

    rows: int  # the sequences' tokens, without what fills up
    logits_rows: int
    qo_indptr: Int32s  # [sequences + 1], half-open ranges of rows
    kv_indptr: Int32s  # [sequences + 1], half-open ranges of kv_indices
    kv_lens: Int32s  # [sequences]


class StepBuffers:
    """On the device, for up to `max_rows` rows, `max_sequences` sequences and `max_pages` table entries:

        token_ids    int64 [max_rows]
        positions    int64 [max_rows]
        kv_slots     int64 [max_rows]           where a row's key and value go; -1: nowhere
        logits_rows  int64 [max_rows]           rows that reach the head
        qo_indptr    int32 [max_sequences + 1]  as in StepShape
        kv_indptr    int32 [max_sequences + 1]
        last_page_len int32 [max_sequences]     tokens in a sequence's last block
        kv_indices   int32 [max_pages]          block ids, sequence after sequence

    What one step leaves is there until the next `fill`. On the CPU nothing is copied.
    """

    def __init__(self, max_rows: int, max_sequences: int, max_pages: int, kv_cache: KVCache) -> None:
        self.max_rows = max_rows
        self._block_size = kv_cache.block_size
        self._spare_block = kv_cache.num_blocks
        tables = 3 * max_sequences + 2
        rows_end = 2 * _ROW_FIELDS * max_rows
        self._fixed = rows_end + tables
        self._staging = Staging(self._fixed + max_pages, kv_cache.device)
        self._fields = [_Fields(array, max_rows, max_sequences) for array in self._staging.arrays]
        rows = self._staging.part(0, rows_end).view(torch.int64).view(_ROW_FIELDS, max_rows)
        self.token_ids, self.positions, self.kv_slots, self.logits_rows = rows[:4]
        self._pending_rows, self._pending_sources = rows[4:]
        rest = self._staging.part(rows_end, tables + max_pages)
        ends = list(accumulate((max_sequences + 1, max_sequences + 1, max_sequences), initial=0))
        self.qo_indptr, self.kv_indptr, self.last_page_len = (
            rest[start:end] for start, end in pairwise(ends)
        )
        self.kv_indices = rest[ends[-1] :]

    def fill(
        self,
        sequences: Sequence[SequenceRows],
        last_tokens: Tensor | None = None,
        *,
        rows: int = 0,
        single_rows: int = 0,
    ) -> StepShape:
        """Enqueue the step's copy, and the ids that only `last_tokens` has.

        Filled up to `rows` rows that belong to no sequence, or to `single_rows` sequences of one row each
        that read one position of the spare block: what a captured step of fixed size needs. The sequences
        must be possible and fit the buffers.
        """
        fields = self._fields[self._staging.begin()]
        shape = fields.write(sequences, self._block_size, self._spare_block, rows, single_rows)
        self._staging.send(self._fixed + int(shape.kv_indptr[-1]))
        if fields.pending:
            self._fill_pending(fields.pending, last_tokens)
        return shape

    def _fill_pending(self, count: int, last_tokens: Tensor | None) -> None:
        if last_tokens is None:
            raise ValueError(f"{count} sequences have a pending token, but there are no last_tokens")
        known = last_tokens.index_select(0, self._pending_sources[:count])
        self.token_ids.index_copy_(0, self._pending_rows[:count], known)


class _Fields:
    """The same arrays in one host buffer."""

    def __init__(self, memory: Int32s, max_rows: int, max_sequences: int) -> None:
        rows_end = 2 * _ROW_FIELDS * max_rows
        self._rows = memory[:rows_end].view(np.int64).reshape(_ROW_FIELDS, max_rows)
        tables = memory[rows_end:]
        self._qo_indptr, self._kv_indptr = tables[: 2 * max_sequences + 2].reshape(2, -1)
        self._last_page_len, self._kv_indices = np.split(tables[2 * max_sequences + 2 :], [max_sequences])
        self.pending = 0

    def write(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        spare_block: int,
        rows: int,
        single_rows: int,
    ) -> StepShape:
        count = len(sequences)
        sizes = np.fromiter((len(s.token_ids) for s in sequences), np.int64, count)
        starts = np.fromiter((s.start for s in sequences), np.int64, count)
        kv_lens = starts + sizes
        pages = -(-kv_lens // block_size)
        total = self._write_tables(sizes, kv_lens, pages, block_size)
        self._kv_indices[: pages.sum()] = np.fromiter(
            chain.from_iterable(s.block_ids[:n] for s, n in zip(sequences, pages.tolist(), strict=True)),
            np.int32,
            int(pages.sum()),
        )
        self._write_rows(sequences, sizes, starts, block_size, total)
        logits = self._write_logits_rows(sequences)
        self._write_pending(sequences)
        filled = self._fill_up(count, total, int(pages.sum()), rows, single_rows, spare_block)
        return StepShape(
            total,
            logits,
            self._qo_indptr[: filled + 1],
            self._kv_indptr[: filled + 1],
            np.concatenate((kv_lens, np.ones(filled - count, np.int64))).astype(np.int32),
        )

    def _write_tables(self, sizes: Int64s, kv_lens: Int64s, pages: Int64s, block_size: int) -> int:
        count = len(sizes)
        np.cumsum(sizes, out=self._qo_indptr[1 : count + 1])
        np.cumsum(pages, out=self._kv_indptr[1 : count + 1])
        self._last_page_len[:count] = (kv_lens - 1) % block_size + 1
        return int(self._qo_indptr[count])

    def _write_rows(
        self, sequences: Sequence[SequenceRows], sizes: Int64s, starts: Int64s, block_size: int, total: int
    ) -> None:
        token_ids, positions, kv_slots = self._rows[:3]
        token_ids[:total] = np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, total)
        count = len(sizes)
        first_rows, first_pages = self._qo_indptr[:count], self._kv_indptr[:count]
        positions[:total] = np.arange(total) + (starts - first_rows).repeat(sizes)
        block, offset = np.divmod(positions[:total], block_size)
        blocks = self._kv_indices[block + first_pages.repeat(sizes)]
        kv_slots[:total] = blocks.astype(np.int64) * block_size + offset

    def _write_logits_rows(self, sequences: Sequence[SequenceRows]) -> int:
        firsts = self._qo_indptr[: len(sequences)].tolist()
        wanted = [first + row for first, s in zip(firsts, sequences, strict=True) for row in s.logit_rows]
        self._rows[3, : len(wanted)] = wanted
        return len(wanted)

    def _write_pending(self, sequences: Sequence[SequenceRows]) -> None:
        pending = np.fromiter((s.pending for s in sequences), np.int64, len(sequences))
        (known,) = (pending >= 0).nonzero()
        self.pending = len(known)
        self._rows[4, : len(known)] = self._qo_indptr[known + 1] - 1
        self._rows[5, : len(known)] = pending[known]

    def _fill_up(
        self, count: int, total: int, pages: int, rows: int, single_rows: int, spare_block: int
    ) -> int:
        """Sequences after it."""
        filled, end = max(count, single_rows), max(total, rows, single_rows)
        token_ids, positions, kv_slots = self._rows[:3]
        token_ids[total:end], positions[total:end], kv_slots[total:end] = 0, 0, -1
        more = np.arange(1, filled - count + 1, dtype=np.int32)
        self._qo_indptr[count + 1 : filled + 1] = total + more
        self._kv_indptr[count + 1 : filled + 1] = pages + more
        self._last_page_len[count:filled] = 1
        self._kv_indices[pages : pages + len(more)] = spare_block
        return filled

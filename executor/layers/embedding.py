"""The vocabulary's embedding and head, each cut by token over the ranks, and the logits.

Every rank has as many rows; the last one's end is padded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.distributed import SINGLE, ParallelGroup


def vocab_rows(vocab_size: int, group: ParallelGroup) -> int:
    """Rows of the vocabulary on each rank, padding included."""
    return -(-vocab_size // group.size)


def vocab_share(vocab_size: int, group: ParallelGroup) -> range:
    """This rank's tokens. ValueError when so few tokens meet so many ranks that one would have none."""
    rows = vocab_rows(vocab_size, group)
    if rows * (group.size - 1) >= vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} leaves one of {group.size} ranks without a token")
    return range(rows * group.rank, min(vocab_size, rows * (group.rank + 1)))


class VocabParallelEmbedding(nn.Module):
    """token_ids [rows] -> table[token_ids] [rows, embedding_dim], the table being [num_embeddings,
    embedding_dim].

    `weight` is this rank's `vocab_range` of it, then zeros.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.group = group
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.vocab_range = vocab_share(num_embeddings, group)
        rows = vocab_rows(num_embeddings, group)
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim), requires_grad=False)
        nn.init.zeros_(self.weight[len(self.vocab_range) :])

    def local(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """(rows of `weight`, where the token is another rank's). Such a row is 0, and its output void."""
        if self.group.size == 1:
            return token_ids, None
        local_ids = token_ids - self.vocab_range.start
        foreign = (local_ids < 0) | (local_ids >= len(self.vocab_range))
        return local_ids.masked_fill(foreign, 0), foreign

    def reduce(self, y: Tensor, foreign: Tensor | None) -> Tensor:
        """Every token's row from the rank that has it: [rows, embedding_dim], changed in place."""
        if foreign is not None:
            y.masked_fill_(foreign[:, None], 0)
        return self.group.all_reduce(y)

    def forward(self, token_ids: Tensor) -> Tensor:
        local_ids, foreign = self.local(token_ids)
        return self.reduce(F.embedding(local_ids, self.weight), foreign)


class ParallelLMHead(VocabParallelEmbedding):
    """The output matrix [vocab, hidden]. A tied head holds the embedding's own parameter."""

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        self.weight = embedding.weight


class LogitsProcessor(nn.Module):
    """hidden [n, hidden] -> logits [n, vocab] float32, on every rank. The head is an argument, so that what
    wraps this layer can add to the logits without touching the (perhaps tied) weight.

    With `soft_cap` a logit becomes soft_cap * tanh(logit / soft_cap), and then it is multiplied by `scale`.
    """

    def __init__(
        self,
        vocab_size: int,
        group: ParallelGroup = SINGLE,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """ValueError for a `soft_cap` that is not above 0, and for few tokens (`vocab_share`)."""
        super().__init__()
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"soft_cap is {soft_cap}: it must be above 0, or None for no cap")
        self.group = group
        self.vocab_size = vocab_size
        self.vocab_range = vocab_share(vocab_size, group)
        self.scale = scale
        self.soft_cap = soft_cap

    def local(self, lm_head: ParallelLMHead, hidden: Tensor) -> Tensor:
        """This rank's columns of the head's product, padding included."""
        return F.linear(hidden, lm_head.weight).float()

    def gather(self, logits: Tensor) -> Tensor:
        """All ranks' columns, side by side, without the padding."""
        if self.group.size == 1:
            return logits
        return self.group.gather_columns(logits)[:, : self.vocab_size]

    def finish(self, logits: Tensor) -> Tensor:
        """The cap and the scale, in place; what adapters add must be in, as a cap is not linear."""
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits

    def forward(self, lm_head: ParallelLMHead, hidden: Tensor) -> Tensor:
        return self.finish(self.gather(self.local(lm_head, hidden)))

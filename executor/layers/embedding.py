import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VocabParallelEmbedding(nn.Module):
    """token_ids [rows] -> weight[token_ids] [rows, embedding_dim]; weight [num_embeddings, embedding_dim]."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    """The output matrix [vocab, hidden]. A tied head holds the embedding's own parameter."""

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        self.weight = embedding.weight


class LogitsProcessor(nn.Module):
    """hidden [n, hidden] -> logits [n, vocab] float32. The head is an argument, so that what wraps this layer
    can add to the logits without touching the (perhaps tied) weight."""

    def forward(self, lm_head: ParallelLMHead, hidden: Tensor) -> Tensor:
        return F.linear(hidden, lm_head.weight).float()

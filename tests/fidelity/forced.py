"""A prompt in two chunks, then token by token: ours, and what transformers and PEFT say of the same tokens.

All sequences are in one batch, with adapters of their own or none.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import lorafleet.demo
from adapter_store import DiskStore, ModelSpec, Weights
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import SINGLE
from executor.lora.arena import TensorCopy
from executor.lora.image import build_slot_image
from executor.step.inputs import SequenceRows
from executor.step.shard import Shard, with_fused_modules
from lorafleet.demo.model import default_cache, prepare_model
from tests.support.adapters.peft import Kind, dense, load_adapter, load_base, make_adapter, make_base

BLOCK, CHUNKS = 16, (20, 13, 1, 1, 1, 1)
LENGTH = sum(CHUNKS)
STD = 0.08  # of the adapters' values: loud, and not so loud that rounding decides
RANKS = (None, 8, 16)  # by sequence; None: the base model
# What FlashInfer serves, and so is captured. Heads of 128: one form of its kernels to compile.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
# What an adapter may have beside A and B.
EXTRAS: list[dict[str, Any]] = [
    {},
    {"use_dora": True},
    {"use_dora": True, "targets": ["q_proj", "up_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    {"targets": ["o_proj", "down_proj"], "modules_to_save": ["lm_head"]},
]


@dataclass(frozen=True)
class Case:
    """A base, the adapter of each sequence (None: the base model), and what transformers and PEFT say of
    `token_ids` [sequences, LENGTH]."""

    base: Path
    adapters: list[Path | None]
    token_ids: Tensor

    @classmethod
    def tiny(cls, kind: Kind, folder: Path, **overrides: Any) -> "Case":
        base = make_base(folder / "base", kind, seed=1, **overrides)
        model = load_base(base)
        adapters = [
            None
            if rank is None
            else make_adapter(
                folder / f"a{n}", model, seed=n, rank=rank, alpha=2 * rank, std=STD, targets=dense(kind)
            )
            for n, rank in enumerate(RANKS)
        ]
        token_ids = torch.randint(3, 128, (len(RANKS), LENGTH), generator=torch.Generator().manual_seed(3))
        return cls(base, adapters, token_ids)

    @classmethod
    def dora_and_full_heads(cls, kind: Kind, folder: Path) -> "Case":
        base = make_base(folder / "base", kind, seed=1, **WIDE)
        adapters: list[Path | None] = [None]
        for n, options in enumerate(EXTRAS):
            adapters.append(make_adapter(folder / f"a{n}", base, seed=n, rank=8, std=STD, **options))
        shape = len(adapters), LENGTH
        return cls(base, adapters, torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(3)))

    @classmethod
    def smollm2(cls) -> "Case":
        """The trained adapters that are shipped, each on the start of a chat of its own."""
        base = prepare_model(default_cache(), lambda stage, share: None)
        tokenizer = AutoTokenizer.from_pretrained(base)
        demo = Path(lorafleet.demo.__file__).parent
        chats = json.loads((demo / "prompts.json").read_text())
        text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        ids = [tokenizer(text.format(questions[0])).input_ids for questions in chats.values()]
        token_ids = torch.tensor([(some * LENGTH)[:LENGTH] for some in ids])
        folders = [demo / "adapters" / name for name in chats]
        return cls(base, [folder if folder.is_dir() else None for folder in folders], token_ids)

    @property
    def slots(self) -> list[int]:
        """Of each sequence: not in their order."""
        return [-1 if path is None else len(self.adapters) - n - 1 for n, path in enumerate(self.adapters)]

    @torch.no_grad()
    def logits(self, dtype: torch.dtype) -> Tensor:
        """[sequences, LENGTH, vocab] float32, by transformers and PEFT in `dtype`, one sequence at a time."""
        found = []
        for adapter, token_ids in zip(self.adapters, self.token_ids, strict=True):
            model = load_base(self.base, dtype)
            if adapter is not None:
                model = load_adapter(model, adapter).to(dtype)
            found.append(model(token_ids[None]).logits[0].float())
        return torch.stack(found)

    def ours(self, folder: Path, **settings: object) -> Tensor:
        shard = self._shard(**settings)
        self._load(shard, folder)
        count = len(self.adapters)
        tables = [list(range(n * 4, n * 4 + 4)) for n in range(count)]
        parts, start = [], 0
        for chunk in CHUNKS:
            rows = [
                SequenceRows(ids[start : start + chunk].tolist(), start, table, slot, range(chunk))
                for ids, table, slot in zip(self.token_ids, tables, self.slots, strict=True)
            ]
            logits = shard.forward_pass.run(rows).cpu()
            parts.append(logits.view(count, chunk, -1))
            start += chunk
        return torch.cat(parts, 1)

    def _shard(self, **settings: object) -> Shard:
        count = len(self.adapters)
        given = {
            "model": str(self.base), "store": "unused", "max_loras": count, "max_lora_rank": 16,
            "max_seats": count, "max_batched_tokens": max(CHUNKS) * count, "num_kv_blocks": 4 * count,
            "block_size": BLOCK, "compile_processes": 1,
        } | settings  # fmt: skip
        config = ExecutorConfig(**given)  # type: ignore[arg-type]
        return build_shard(with_fused_modules(config), SINGLE)

    def _load(self, shard: Shard, folder: Path) -> None:
        store, spec = DiskStore(folder), ModelSpec.from_folder(self.base)
        for number, (adapter, slot) in enumerate(zip(self.adapters, self.slots, strict=True)):
            if adapter is not None:
                version = store.put(adapter, "default", f"a{number}", spec)
                with store.open(version.digest) as weights:
                    shard.arena.load(slot, build_slot_image(weights, shard.arena.layout, with_dora=True))
                    self._load_extras(shard, slot, version.digest, weights)
        if shard.arena.storage.is_cuda:
            torch.cuda.synchronize()

    def _load_extras(self, shard: Shard, slot: int, digest: str, weights: Weights) -> None:
        copies: list[TensorCopy] = []
        if (dora := shard.slots.dora) is not None:
            copies += dora.enter(slot, dora.of(digest, weights))
        if (full_heads := shard.slots.full_heads) is not None:
            named = {name: torch.from_numpy(matrix) for name, matrix in weights.full_heads.items()}
            copies += full_heads.enter(slot, named)
        for target, source in copies:
            target.copy_(source)


def decided(oracle: Tensor) -> Tensor:
    """bool [sequences, LENGTH]: where summation order alone cannot choose another greedy token."""
    best = oracle.topk(2).values
    return best[..., 0] - best[..., 1] > 1e-3


def divergence(oracle: Tensor, other: Tensor) -> float:
    """Mean KL of the two distributions over the next token."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (oracle, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_equal(case: Case, ours: Tensor, oracle: Tensor) -> None:
    assert (ours - oracle).abs().max() < 1e-3
    assert torch.equal(*(torch.where(decided(oracle), each.argmax(-1), -1) for each in (ours, oracle)))
    ours, oracle = (torch.log_softmax(logits, -1) for logits in (ours, oracle))
    chosen = case.token_ids[:, 1:, None]
    assert (ours[:, :-1].gather(2, chosen) - oracle[:, :-1].gather(2, chosen)).abs().max() < 1e-4

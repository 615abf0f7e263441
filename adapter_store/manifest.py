"""The values that a store gives out: manifests, pushes, versions and aliases, all of them immutable.

A manifest belongs to its digest for ever, and to all who pushed that content. What else a push says, its
files, its base's name and what was found about it, is a PushFacts: it belongs to one name of one tenant.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

from adapter_store.errors import DataLoss
from adapter_store.module_names import kind_of


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    name: str  # packed name: "layers.3.q_proj", "embed_tokens", "lm_head"
    rank: int
    scale: float  # a float32 value: alpha / rank, or alpha / sqrt(rank) when rank-stabilised
    in_features: int
    out_features: int
    dora: bool = False  # has a magnitude for each output
    num_experts: int = 0  # above 0: there are so many pairs of A and B, stacked

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def a_shape(self) -> tuple[int, ...]:
        """The shape of A in the packed form: [rank, in], or [experts, rank, in]."""
        return self._stacked(self.rank, self.in_features)

    @property
    def b_shape(self) -> tuple[int, ...]:
        """The shape of B in the packed form: [rank, out], or [experts, rank, out]."""
        return self._stacked(self.rank, self.out_features)

    def _stacked(self, *shape: int) -> tuple[int, ...]:
        return (self.num_experts, *shape) if self.num_experts else shape


# One object for all that say the same, as adapters of one base mostly do. With objects of its own for each of
# 400 manifests of 224 modules, each full collection of garbage stopped a scheduler's streams 12 ms longer.
# `typed`: else a 2 that is read could become a 2.0 that was read before.
_module = lru_cache(maxsize=1 << 14, typed=True)(ModuleInfo)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, without dataclasses.asdict's copies of all that is in it."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


@dataclass(frozen=True, slots=True)
class FullHead:
    """A fully trained lm_head or embed_tokens."""

    name: str
    vocab_size: int
    hidden_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.vocab_size, self.hidden_size


@dataclass(frozen=True, slots=True)
class TextRules:
    """What the pushed folder says about text where the base does otherwise; a part of the content."""

    end_token_ids: tuple[int, ...] = ()  # that end its answers, too, beside the base's
    special_tokens: tuple[tuple[str, str], ...] = ()  # as chat templates know them: ("eos_token", "<|end|>")


_AS_THE_BASE = TextRules()


@dataclass(frozen=True, slots=True)
class Manifest:
    digest: str
    modules: tuple[ModuleInfo, ...]  # by layer, then in the order of the forward pass
    dtypes: tuple[str, ...]  # safetensors names, sorted: ("BF16", "F32")
    num_bytes: int  # of the packed file
    chat_template: str | None
    full_heads: tuple[FullHead, ...] = ()  # an executor needs a place for each, besides the slot
    text: TextRules = _AS_THE_BASE

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def module_kinds(self) -> frozenset[str]:
        return frozenset(module.kind for module in self.modules)

    def to_json(self) -> str:
        return json.dumps(self, default=_fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises DataLoss when `text` is not what to_json wrote."""
        try:
            content: dict[str, Any] = json.loads(text)
            content["modules"] = tuple(_module(**module) for module in content["modules"])
            content["full_heads"] = tuple(FullHead(**head) for head in content.get("full_heads", ()))
            content["dtypes"] = tuple(content["dtypes"])
            if text := content.pop("text", None):
                special = tuple((str(name), str(token)) for name, token in text["special_tokens"])
                content["text"] = TextRules(tuple(map(int, text["end_token_ids"])), special)
            return cls(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise DataLoss(f"a stored manifest is damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class PushWarning:
    reason: str  # for programs: it stays what it is; README.md lists them
    message: str  # for people


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How a push is to be taken."""

    alias: str | None = "latest"  # that moves to the version; None: no alias moves
    expected_generation: int | None = None  # the alias's, as the pusher last saw it; 0: "does not exist"
    strict: bool = False  # nothing is taken that would be warned of
    strict_base: bool = False  # nothing is taken that names another base model
    warnings: tuple[PushWarning, ...] = ()  # the pusher's own, which are kept behind the store's
    max_rank: int | None = None  # of a module; None: as it comes
    dry_run: bool = False  # the folder is only checked
    digest: str | None = None  # a migration's: the version as an older release made it, if it can be


AS_IT_COMES = PushOptions()


@dataclass(frozen=True, slots=True)
class PushFacts:
    """What the last push of a version under this name said beside its content."""

    base_model: str = ""  # as the adapter's config names it; "" when it names none
    peft_version: str | None = None
    warnings: tuple[PushWarning, ...] = ()
    files: str = ""  # which of the store's sets of pushed files is its own; "" when they are lost


class VersionState(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"  # no new request gets it; pushing it again makes it active
    DELETED = "deleted"  # the same, and `collect` removes it once nobody uses it


@dataclass(frozen=True, slots=True)
class Version:
    tenant: str
    name: str
    digest: str
    manifest: Manifest
    push: PushFacts
    created_at: float  # unix seconds of the first push under this name
    protected: bool  # may not be deleted
    state: VersionState = VersionState.ACTIVE
    quarantined: bool = False  # its bytes were found damaged: refused as DataLoss until pushed again


@dataclass(frozen=True, slots=True)
class Alias:
    tenant: str
    name: str
    alias: str
    digest: str  # of a split alias the one with the most weight
    generation: int  # counts the moves of this alias, from 1; survives its deletion
    weights: Mapping[str, int] = field(default_factory=dict)  # by digest; empty unless it is split

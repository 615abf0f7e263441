"""What a version holds, in a few lines, and how two versions differ."""

from collections.abc import Iterable, Iterator

from lorafleet.results import AdapterModule, AdapterVersion
from lorafleet.terminal import size


def content(version: AdapterVersion) -> str:
    """The content as "modules: 14 (q_proj v_proj, layers: 7), rank 8, scale 2, BF16, 3.4 MB"."""
    kinds = " ".join(sorted({_kind(module.name) for module in version.modules}))
    layers = {module.name.split(".")[1] for module in version.modules if module.name.startswith("layers.")}
    on = f", layers: {len(layers)}" if layers else ""
    ranks, scales = (_values(m.rank for m in version.modules), _values(m.scale for m in version.modules))
    parts = [f"modules: {len(version.modules)} ({kinds}{on})", f"rank {ranks}", f"scale {scales}"]
    if version.full_heads:
        parts.append(f"full heads: {' '.join(version.full_heads)}")
    return ", ".join([*parts, "+".join(version.dtypes) or "?", size(version.num_bytes)])


def differences(old: AdapterVersion, new: AdapterVersion) -> list[str]:
    """One line each: "- " what only the old one has, "+ " the new one, "~ " what changed."""
    lines = [
        f"~ {what}: {before} -> {after}"
        for what, before, after in (
            ("base", old.base_model, new.base_model),
            ("full heads", " ".join(old.full_heads) or "none", " ".join(new.full_heads) or "none"),
            ("dtypes", "+".join(old.dtypes), "+".join(new.dtypes)),
            ("size", size(old.num_bytes), size(new.num_bytes)),
            ("chat template", _own(old.has_chat_template), _own(new.has_chat_template)),
        )
        if before != after
    ]
    before, after = ({module.name: module for module in version.modules} for version in (old, new))
    lines += [f"- {_described(before[name])}" for name in before if name not in after]
    lines += [f"+ {_described(after[name])}" for name in after if name not in before]
    lines += [
        f"~ {name}: {', '.join(_changes(module, after[name]))}"
        for name, module in before.items()
        if name in after and module != after[name]
    ]
    return lines


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _values(values: Iterable[float]) -> str:
    found = sorted(set(values))
    few = [f"{value:g}" for value in found]
    return ", ".join(few) if len(few) <= 4 else f"{few[0]} to {few[-1]}"


def _own(has_template: bool) -> str:
    return "its own" if has_template else "of the base"


def _described(module: AdapterModule) -> str:
    return f"{module.name} rank {module.rank} scale {module.scale:g}"


def _changes(old: AdapterModule, new: AdapterModule) -> Iterator[str]:
    if old.rank != new.rank:
        yield f"rank {old.rank} -> {new.rank}"
    if old.scale != new.scale:
        yield f"scale {old.scale:g} -> {new.scale:g}"

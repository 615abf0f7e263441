"""config.json of a base model, with what it leaves out filled in as transformers fills it in."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_store.base.families import FAMILIES, ExpertFields, Family, WindowRope
from adapter_store.base.fields import Fields
from adapter_store.base.traits import nearest
from adapter_store.errors import InvalidModel

CONFIG_FILE = "config.json"
# Types of rotary embedding whose frequencies depend on the length that a model was first trained with.
_STRETCHED = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    inner: int  # intermediate_size of one of them
    shared_inner: int | None  # of the expert that every token has beside its own
    layers: tuple[bool, ...]  # which decoder layers have experts; the others have a plain MLP


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """What both services take from config.json. The rest of it is in `fields`, for whoever needs more."""

    architecture: str
    written: Mapping[str, Any]  # the file as it is
    fields: Fields  # with the family's defaults where the file has no value
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int  # of a prompt with its answer
    tied_head: bool
    rope: Fields  # as transformers' rope_parameters: rope_theta, rope_type and the type's own, in one object
    window_rope: Fields | None  # the same of layers with a window; None: theirs is `rope`
    experts: Experts | None
    own_projections: Mapping[str, tuple[str, ...]]  # as the family's
    activation: str
    norm_eps: float

    @classmethod
    def from_folder(cls, folder: Path) -> "BaseConfig":
        """Raises InvalidModel, naming the file and the field."""
        written = Fields.from_file(folder / CONFIG_FILE)
        architecture = _architecture(written)
        family = FAMILIES[architecture]
        fields = _complete(written, family)
        num_heads = fields.integer("num_attention_heads")
        rope, window_rope = _ropes(fields, family)
        return cls(
            architecture=architecture,
            written=written.values,
            fields=fields,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads),
            head_dim=_head_dim(fields, num_heads),
            max_length=_max_length(fields, rope),
            tied_head=fields.flag("tie_word_embeddings"),
            rope=rope,
            window_rope=window_rope,
            experts=_experts(fields, family.experts),
            own_projections=family.own_projections,
            activation=fields.text(family.activation),
            norm_eps=fields.number(family.norm_eps),
        )


def _architecture(written: Fields) -> str:
    match written.values.get("architectures"):
        case [str(architecture)] if architecture in FAMILIES:
            return architecture
        case [str(architecture)]:
            near = f"the nearest is {nearest(architecture)}, and all are"
        case _:
            near = "it must be a list with one of"
    other = written.values.get("architectures")
    raise InvalidModel(
        f"{written.origin}: architectures {other!r} is not served; {near} {', '.join(FAMILIES)}"
    )


def _complete(written: Fields, family: Family) -> Fields:
    values = dict(written.values)
    for alias, name in family.aliases.items():
        said = values.pop(alias, None)
        if said is not None and values.setdefault(name, said) != said:
            raise InvalidModel(f"{written.origin}: {alias} = {said!r}, but {name} = {values[name]!r}")
    for name, default in family.defaults.items():
        if values.setdefault(name, default) is None and default is not None and name not in family.nullable:
            raise InvalidModel(f"{written.origin}: {name} must not be null; leave it out for {default!r}")
    if values.get("transformers_weights") is not None:
        raise InvalidModel(f"{written.origin}: transformers_weights is not served; use the usual file names")
    return Fields(values, written.origin)


def _max_length(fields: Fields, rope: Fields) -> int:
    """Longrope turns all of a sequence by other angles once it is longer than those that the model was first
    trained with: what was computed before is void then. So none may become longer."""
    whole = fields.integer("max_position_embeddings")
    if rope.values["rope_type"] != "longrope":
        return whole
    return min(whole, rope.integer("original_max_position_embeddings"))


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim")
    if head_dim is not None:
        return head_dim
    hidden_size = fields.integer("hidden_size")
    if hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads = {num_heads} without head_dim")
    return hidden_size // num_heads


def _ropes(fields: Fields, family: Family) -> tuple[Fields, Fields | None]:
    """The rotation of all layers, or of those without and those with a window."""
    if family.window_rope is None:
        return _rope(fields, family), None
    return _full_rope(fields, family), _window_rope(fields, family.window_rope)


def _full_rope(fields: Fields, family: Family) -> Fields:
    """rope_scaling, transformers 4's name, wins over rope_parameters' part. There transformers 5 passes over
    a `type`, an older name of rope_type."""
    scaling = fields.values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or ("type" in scaling and "rope_type" not in scaling):
        raise fields.wrong("rope_scaling", "an object with rope_type")
    values = {**_part(fields, "full_attention"), **scaling}
    return _by_layer(fields, values, "full_attention", fields.values.get("rope_theta", family.rope_theta))


def _window_rope(fields: Fields, window: WindowRope) -> Fields:
    theta = fields.values.get(window.theta_field, window.theta) if window.theta_field else window.theta
    return _by_layer(fields, _part(fields, "sliding_attention"), "sliding_attention", theta)


def _part(fields: Fields, kind: str) -> Mapping[str, Any]:
    """What rope_parameters says of layers of this kind."""
    both = fields.values.get("rope_parameters") or {}
    part = both.get(kind) or {} if isinstance(both, Mapping) else None
    if not isinstance(part, Mapping) or (both and not both.keys() & {"full_attention", "sliding_attention"}):
        raise fields.wrong("rope_parameters", "an object with full_attention and sliding_attention")
    return part


def _by_layer(fields: Fields, values: Mapping[str, Any], kind: str, theta: object) -> Fields:
    rope = {"rope_theta": theta, **values}
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in _STRETCHED:
        rope.setdefault("original_max_position_embeddings", fields.values["max_position_embeddings"])
    return Fields(rope, f"{fields.origin}: rope_parameters.{kind}")


def _rope(fields: Fields, family: Family) -> Fields:
    """rope_scaling, transformers 4's name, wins over rope_parameters; a theta within over one beside."""
    given = fields.values.get("rope_parameters")
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get("rope_scaling") or (family.rope if given is None else given)
    if not isinstance(values, Mapping) or any(isinstance(value, dict) for value in values.values()):
        raise fields.wrong(name, "one flat object for all layers")
    rope = {"rope_theta": fields.values.get("rope_theta", family.rope_theta), **values}
    share = fields.values.get("partial_rotary_factor", family.partial_rotation)
    if share is not None:
        rope.setdefault("partial_rotary_factor", share)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope["rope_type"] = family.rope_types.get(kind, kind)
    if rope["rope_type"] in _STRETCHED:
        rope.setdefault("original_max_position_embeddings", fields.values["max_position_embeddings"])
        if "original_max_position_embeddings" in fields.values:
            rope["original_max_position_embeddings"] = fields.values["original_max_position_embeddings"]
    return Fields(rope, f"{fields.origin}: {name}")


def _experts(fields: Fields, names: ExpertFields | None) -> Experts | None:
    if names is None:
        return None
    num_layers = fields.integer("num_hidden_layers")
    return Experts(
        count=fields.integer(names.count),
        inner=fields.integer(names.inner),
        shared_inner=fields.integer(names.shared) if names.shared else None,
        layers=_sparse_layers(fields, num_layers) if names.picked_layers else (True,) * num_layers,
    )


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it."""
    step, dense = fields.integer("decoder_sparse_step"), fields.values["mlp_only_layers"] or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(layers):
        raise fields.wrong("mlp_only_layers", "a list that leaves a layer with experts")
    return layers

"""What adapters must fit: the base model's shapes, read from its folder without loading weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adapter_store.base.checkpoint import read_tensors
from adapter_store.base.config import CONFIG_FILE, BaseConfig
from adapter_store.base.model_name import model_name
from adapter_store.errors import InvalidModel
from adapter_store.files.safetensors_file import DamagedFile, TensorFile
from adapter_store.module_names import PATHS_IN_LAYER, layer_of, place_of
from adapter_store.moe_checkpoint import check_experts
from adapter_store.moe_spec import MoESpec, moe_spec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Two specs with one fingerprint describe the same config, tokenizer and checkpoint layout."""

    fingerprint: str  # 64 hex: sha256 over config, tokenizer files, and names, dtypes, shapes of all weights
    architecture: str
    num_layers: int
    vocab_size: int
    tied_head: bool
    hidden_size: int
    # Name without its layer ("q_proj", "experts.w2") -> (in_features, out_features).
    modules: Mapping[str, tuple[int, int]] = field(hash=False)
    max_model_len: int
    name: str
    moe: MoESpec | None = field(default=None, hash=False)
    # Of modules with a bias in the checkpoint, without their layer: q_proj, k_proj and v_proj of Qwen2.
    biased: frozenset[str] = frozenset()
    # Where it was read from: ingest compares an adapter's copies of base layers and its tokenizer with it.
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def from_folder(cls, path: Path) -> "ModelSpec":
        """Raises InvalidModel, naming the file and the field or tensor."""
        base, tensors = BaseConfig.from_folder(path), read_tensors(path)
        weights = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        spec = cls._of(base, path, _fingerprint(path, base.written, weights), weights)
        _check_shapes(spec, weights)
        return spec

    @classmethod
    def from_config_alone(cls, path: Path) -> "ModelSpec":
        """The spec of a model with random weights. No spec with a checkpoint has its fingerprint.

        Raises InvalidModel, naming the file and the field.
        """
        base = BaseConfig.from_folder(path)
        fingerprint = hashlib.sha256(b"random weights of " + (path / CONFIG_FILE).read_bytes()).hexdigest()
        return cls._of(base, path, fingerprint, tensors=())

    @classmethod
    def _of(cls, base: BaseConfig, path: Path, fingerprint: str, tensors: Iterable[str]) -> "ModelSpec":
        moe = moe_spec(base)
        return cls(
            fingerprint=fingerprint,
            architecture=base.architecture,
            num_layers=base.num_layers,
            vocab_size=base.vocab_size,
            tied_head=base.tied_head,
            hidden_size=base.hidden_size,
            modules=_modules(base, moe),
            max_model_len=base.max_length,
            name=model_name(str(path.resolve())),
            moe=moe,
            biased=_biased(tensors),
            folder=path.resolve(),
        )

    def has_place_for(self, module: str) -> bool:
        """Whether a layer of this number and kind, or one outside of the layers, has such a module."""
        layer, place = layer_of(module), place_of(module)
        if place not in self.modules or (layer is not None and layer >= self.num_layers):
            return False
        if self.moe is None or PATHS_IN_LAYER.get(place, "").startswith("self_attn") or layer is None:
            return True
        return (place in self.moe.places) == (layer in self.moe.layers)

    def path_of(self, module: str) -> str:
        """Where transformers keeps a packed module of this base: "model.layers.0.mlp.router"."""
        if self.moe is not None and place_of(module) == "router":
            return f"model.layers.{layer_of(module)}.{self.moe.router_path}"
        return module_path(module)

    def open_base_tensor(self, module: str) -> tuple[TensorFile, str]:
        """The checkpoint file with the weight of embed_tokens or lm_head, and the tensor's name in it.

        Raises InvalidModel when the folder is not known or not readable any more.
        """
        if self.folder is None:
            raise InvalidModel("the base model's folder is not known, so its weights cannot be compared")
        name = weight_name("embed_tokens" if self.tied_head else module)
        tensor = read_tensors(self.folder).get(name)
        if tensor is None:
            raise InvalidModel(f"the base model's checkpoint no longer holds {name}")
        try:
            return TensorFile.open(tensor.file), name
        except (OSError, DamagedFile) as error:
            raise InvalidModel(f"the base model cannot be read: {error}") from error


def weight_name(module: str) -> str:
    """The checkpoint's name: "layers.0.q_proj" -> "model.layers.0.self_attn.q_proj.weight"."""
    return f"{module_path(module)}.weight"


def module_path(module: str) -> str:
    """Where transformers keeps a packed module: "layers.0.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    if module == "lm_head":
        return module
    layer = layer_of(module)
    return f"model.{module}" if layer is None else f"model.layers.{layer}.{PATHS_IN_LAYER[place_of(module)]}"


def _modules(base: BaseConfig, moe: MoESpec | None) -> dict[str, tuple[int, int]]:
    hidden, vocab, inner = base.hidden_size, base.vocab_size, base.intermediate_size
    query, key_value = base.num_heads * base.head_dim, base.num_kv_heads * base.head_dim
    modules = {
        "o_proj": (query, hidden),
        "embed_tokens": (vocab, hidden),
        "lm_head": (hidden, vocab),
    }
    modules |= {"q_proj": (hidden, query), "k_proj": (hidden, key_value), "v_proj": (hidden, key_value)}
    if moe is None or len(moe.layers) < base.num_layers:
        modules |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    for name, parts in base.own_projections.items():
        replaced = [modules.pop(part) for part in parts]
        modules[name] = (replaced[0][0], sum(width for _, width in replaced))
    if "c_fc" in modules:  # without a gate
        modules["c_fc"] = (hidden, inner)
    return modules | (dict(moe.places) if moe else {})


def _biased(tensors: Iterable[str]) -> frozenset[str]:
    """Names without their layer of all modules that have a bias in any of them."""
    places = {path: place for place, path in PATHS_IN_LAYER.items()} | {"mlp.router": "router"}
    paths = (name.removesuffix(".bias").split(".", 3)[-1] for name in tensors if name.endswith(".bias"))
    return frozenset(places[path] for path in paths if path in places)


def _fingerprint(path: Path, config: object, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    parts = hashlib.sha256()
    for name in TOKENIZER_FILES:
        file = path / name
        parts.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    for value in (config, sorted(weights.items())):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        parts.update(hashlib.sha256(text.encode()).digest())
    return parts.hexdigest()


def _check_shapes(spec: ModelSpec, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """The config's arithmetic against the checkpoint's word, for each weight that an adapter may change."""
    every = (f"layers.{i}.{place}" for i in range(spec.num_layers) for place in PATHS_IN_LAYER)
    modules = [module for module in every if spec.has_place_for(module) and ".experts." not in module]
    if spec.moe is not None:
        check_experts(spec.moe, weights)
        weights = {name.replace(".block_sparse_moe.", ".mlp."): found for name, found in weights.items()}
    for module in [*modules, "embed_tokens", *([] if spec.tied_head else ["lm_head"])]:
        in_features, out_features = spec.modules[place_of(module)]
        # An embedding's weight is [vocab, hidden], a linear layer's [out, in].
        wanted = (in_features, out_features) if module == "embed_tokens" else (out_features, in_features)
        name = f"{spec.path_of(module)}.weight"
        _, found = weights.get(name, ("", None))
        if found != wanted:
            raise InvalidModel(f"{name} has shape {found}, config.json says {list(wanted)}")

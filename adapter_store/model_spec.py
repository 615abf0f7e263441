"""What adapters must fit: the base model's shapes, read from its folder without loading weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_store.errors import InvalidModel
from adapter_store.safetensors_file import DamagedFile, Header, TensorFile, read_header

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")

# Where each dense projection sits inside "model.layers.{i}.".
PROJECTION_PARENT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
MODULE_KINDS = (*PROJECTION_PARENT, "embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Two specs with one fingerprint describe the same config, tokenizer and checkpoint layout."""

    fingerprint: str  # 64 hex: sha256 over config, tokenizer files, and names, dtypes, shapes of all weights
    architecture: str
    num_layers: int
    vocab_size: int
    tied_head: bool
    hidden_size: int
    modules: Mapping[str, tuple[int, int]] = field(hash=False)  # kind -> (in_features, out_features)
    max_model_len: int
    name: str
    # Where it was read from: ingest compares an adapter's copies of base layers and its tokenizer with it.
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def from_folder(cls, path: Path) -> "ModelSpec":
        """Raises InvalidModel, naming the file and the field or tensor."""
        config = _read_config(path)
        architecture = _architecture(config)
        weights = _checkpoint_shapes(path)
        tied = config.get("tie_word_embeddings") is True
        modules = _modules(config)
        spec = cls(
            fingerprint=_fingerprint(path, config, weights),
            architecture=architecture,
            num_layers=_positive(config, "num_hidden_layers"),
            vocab_size=_positive(config, "vocab_size"),
            tied_head=tied,
            hidden_size=_positive(config, "hidden_size"),
            modules=modules,
            max_model_len=_positive(config, "max_position_embeddings"),
            name=path.resolve().name,
            folder=path.resolve(),
        )
        _check_shapes(spec, weights)
        return spec

    def open_base_tensor(self, module: str) -> tuple[TensorFile, str]:
        """The checkpoint file with the weight of embed_tokens or lm_head, and the tensor's name in it.

        Raises InvalidModel when the folder is not known or not readable any more.
        """
        if self.folder is None:
            raise InvalidModel("the base model's folder is not known, so its weights cannot be compared")
        name = weight_name("embed_tokens" if self.tied_head else module)
        try:
            for file in _checkpoint_files(self.folder):
                if name in read_header(file).tensors:
                    return TensorFile.open(file), name
        except (OSError, DamagedFile) as error:
            raise InvalidModel(f"the base model cannot be read: {error}") from error
        raise InvalidModel(f"the base model's checkpoint no longer holds {name}")


def weight_name(module: str) -> str:
    """The checkpoint's name: "layers.0.q_proj" -> "model.layers.0.self_attn.q_proj.weight"."""
    return f"{module_path(module)}.weight"


def module_path(module: str) -> str:
    """Where transformers keeps a packed module: "layers.0.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    if module == "lm_head":
        return module
    parent, dot, kind = module.rpartition(".")
    return f"model.{parent}.{PROJECTION_PARENT[kind]}.{kind}" if dot else f"model.{module}"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{path.name}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidModel(f"{path.name}/config.json is not a JSON object")
    return config


def _architecture(config: Mapping[str, Any]) -> str:
    match config.get("architectures"):
        case [str(architecture)] if architecture in ARCHITECTURES:
            return architecture
        case other:
            raise InvalidModel(
                f"config.json: architectures {other!r} is not served; use one of {ARCHITECTURES}"
            )


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise InvalidModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _modules(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, vocab = _positive(config, "hidden_size"), _positive(config, "vocab_size")
    inner, heads = _positive(config, "intermediate_size"), _positive(config, "num_attention_heads")
    kv_heads = (
        heads if config.get("num_key_value_heads") is None else _positive(config, "num_key_value_heads")
    )
    head_dim = hidden // heads if config.get("head_dim") is None else _positive(config, "head_dim")
    query, key_value = heads * head_dim, kv_heads * head_dim
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
        "embed_tokens": (vocab, hidden),
        "lm_head": (hidden, vocab),
    }


def _checkpoint_files(path: Path) -> list[Path]:
    """The shards that the index names, or the single file."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return [path / "model.safetensors"]
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{index.name} is damaged: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise InvalidModel(f"{index.name} names a file outside its folder")
    return [path / name for name in names]


def _checkpoint_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (dtype, shape), over all shards."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        headers: list[Header] = [read_header(file) for file in _checkpoint_files(path)]
    except (OSError, DamagedFile) as error:
        raise InvalidModel(f"the checkpoint in {path.name} cannot be read: {error}") from error
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.name in shapes:
                raise InvalidModel(f"tensor {tensor.name} is in two checkpoint files")
            shapes[tensor.name] = (tensor.dtype, tensor.shape)
    return shapes


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
    modules = [f"layers.{i}.{kind}" for i in range(spec.num_layers) for kind in PROJECTION_PARENT]
    for module in [*modules, "embed_tokens", *([] if spec.tied_head else ["lm_head"])]:
        in_features, out_features = spec.modules[module.rpartition(".")[2]]
        # An embedding's weight is [vocab, hidden], a linear layer's [out, in].
        wanted = (in_features, out_features) if module == "embed_tokens" else (out_features, in_features)
        _, found = weights.get(weight_name(module), ("", None))
        if found != wanted:
            raise InvalidModel(f"{weight_name(module)} has shape {found}, config.json says {list(wanted)}")

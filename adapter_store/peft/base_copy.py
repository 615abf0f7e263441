"""Checks that a copy of base weights inside an adapter equals the base's, so that it can be left out."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import IncompatibleAdapter, InvalidAdapter, InvalidModel
from adapter_store.files.safetensors_file import NUMPY_DTYPES, TensorFile, TensorInfo
from adapter_store.model_spec import ModelSpec

_CHUNK_ELEMENTS = 1 << 22


def check_base_copy(file: TensorFile, copy: TensorInfo, module: str, spec: ModelSpec) -> None:
    """Raises unless `copy` is the base's own weight of embed_tokens or lm_head.

    PEFT saves the layer below a LoRA on embed_tokens or lm_head along with it, trained or not
    (save_embedding_layers="auto"), and puts it into the model on loading. The copy alone does not tell
    whether it was trained, so it is compared with the base checkpoint. Equal after the base is cast to the
    copy's dtype (PEFT writes what the trainer held in memory), it changes nothing and is left out. Otherwise
    the adapter is refused: on our base it would answer from another model.
    """
    in_features, out_features = spec.modules[module]
    wanted = (in_features, out_features) if module == "embed_tokens" else (out_features, in_features)
    if copy.shape != wanted:
        raise IncompatibleAdapter(
            f"tensor {copy.name!r} has shape {list(copy.shape)}, the base {spec.name} needs {list(wanted)}"
        )
    try:
        base_file, base_name = spec.open_base_tensor(module)
    except InvalidModel as error:
        raise InvalidAdapter(f"tensor {copy.name!r} may be a trained copy of the base: {error}") from error
    if not {copy.dtype, base_file.header.tensors[base_name].dtype} <= NUMPY_DTYPES.keys():
        raise InvalidAdapter(f"tensor {copy.name!r} has dtype {copy.dtype}, not F32, F16 or BF16")
    if not _equal_after_cast(base_file.array(base_name), file.array(copy.name)):
        raise InvalidAdapter(
            f"tensor {copy.name!r} differs from the base's {base_name}: a changed base layer is not served"
        )


def _equal_after_cast(base: NDArray[Any], copy: NDArray[Any]) -> bool:
    base, copy = base.reshape(-1), copy.reshape(-1)
    for start in range(0, copy.size, _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        with np.errstate(over="ignore"):  # a float16 copy of a larger value: infinity, as torch casts it
            expected = base[chunk].astype(copy.dtype)
        if not np.array_equal(expected, copy[chunk]):
            return False
    return True

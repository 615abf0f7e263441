"""Complaints about one tensor's form, the same for plain modules and for experts."""

from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.files.safetensors_file import NUMPY_DTYPES, TensorInfo


def check_matrix(tensor: TensorInfo) -> None:
    """Raises InvalidAdapter unless it is one, of floats that are served."""
    if len(tensor.shape) != 2:
        hint = ": gather shards before saving" if len(tensor.shape) == 1 else ""
        raise InvalidAdapter(f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, not 2{hint}")
    if tensor.dtype not in NUMPY_DTYPES:
        raise InvalidAdapter(f"tensor {tensor.name!r} has dtype {tensor.dtype}, not F32, F16 or BF16")


def wrong_shape(
    tensor: TensorInfo, wanted: tuple[int, int], base: str
) -> InvalidAdapter | IncompatibleAdapter:
    """To be raised for a matrix that is not of the `wanted` shape, which follows from the `base`.

    InvalidAdapter where only its axes are the other way round.
    """
    found = f"tensor {tensor.name!r} has shape {list(tensor.shape)}"
    if tensor.shape == wanted[::-1]:
        return InvalidAdapter(f"{found}, which is the transpose of what PEFT writes, {list(wanted)}")
    return IncompatibleAdapter(f"{found}, the base{base and ' '}{base} needs {list(wanted)}")

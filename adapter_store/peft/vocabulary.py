"""Tells an adapter over another vocabulary than the base's, before anything else is guessed.

Whoever resizes the embeddings (resize_token_embeddings, for tokens of their own) and saves with PEFT gets
both tables in up to three copies, trained or not. All that is wrong with such a file follows from its one
cause.
"""

import re

from adapter_store.errors import IncompatibleAdapter
from adapter_store.files.safetensors_file import TensorFile, TensorInfo
from adapter_store.model_spec import ModelSpec
from adapter_store.peft.keys import PREFIX

# The whole matrices that PEFT may write for a table, [vocabulary, hidden].
_MATRIX = r"(?:modules_to_save\.(?:default\.)?|original_module\.|(?:token_adapter\.)?base_layer\.)?weight"
_TABLES = re.compile(PREFIX + r"(?:embed_tokens|lm_head)\." + _MATRIX)
# One half of a pair has the vocabulary, the other one the width.
_HEAD_B = re.compile(PREFIX + r"lm_head\.lora_B(?:\.default)?\.weight")  # [vocabulary, rank]
_TABLE_A = re.compile(PREFIX + r"embed_tokens\.lora_embedding_A(?:\.default)?")  # [rank, vocabulary]


def check_vocabulary(file: TensorFile, spec: ModelSpec) -> None:
    """Raises IncompatibleAdapter, naming the tensor and both sizes.

    What has another width, too, is of another base, as its shape tells by itself.
    """
    for tensor in file:
        axis = _vocabulary_axis(tensor, file, spec)
        if axis is not None and tensor.shape[axis] != spec.vocab_size:
            raise IncompatibleAdapter(
                f"tensor {tensor.name!r} has {tensor.shape[axis]} {('rows', 'columns')[axis]} against the "
                f"{spec.vocab_size} of the base {spec.name}: the vocabulary was resized in training, and "
                "another vocabulary is not served"
            )


def _vocabulary_axis(tensor: TensorInfo, file: TensorFile, spec: ModelSpec) -> int | None:
    """None where there is none, or the width is not the base's."""
    name, shape = tensor.name, tensor.shape
    if ".layers." in name or len(shape) != 2:  # nearly all: the patterns below cost more
        return None
    if _TABLES.fullmatch(name):
        return 0 if shape[1] == spec.hidden_size else None
    if _HEAD_B.fullmatch(name):
        other = _shape_of(file, name.replace("lora_B", "lora_A"))
        return 0 if other[1:] == (spec.hidden_size,) else None
    if _TABLE_A.fullmatch(name):
        other = _shape_of(file, name.replace("lora_embedding_A", "lora_embedding_B"))
        return 1 if other[:1] == (spec.hidden_size,) else None
    return None


def _shape_of(file: TensorFile, name: str) -> tuple[int, ...]:
    found = file.header.tensors.get(name)
    return () if found is None else found.shape

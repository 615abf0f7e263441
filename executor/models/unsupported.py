"""What to raise for a field of config.json that asks for maths which this executor does not have."""

from adapter_store.base.fields import Fields
from executor.errors import UnsupportedModel


def unsupported(fields: Fields, name: str, why: str) -> UnsupportedModel:
    value = fields.values.get(name)
    return UnsupportedModel(f"{fields.origin}: {name} = {value!r} is not supported: {why}")

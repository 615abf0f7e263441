"""What can go wrong in an adapter store.

AdapterStoreError
├── InvalidRef            a reference, tenant, name, alias or digest is not well-formed
├── InvalidModel          the base model's folder cannot be described
├── InvalidAdapter        a pushed folder is malformed, or uses something that is not served
│   └── WarningsRefused   or it could be taken with warnings, and the push is strict
├── IncompatibleAdapter   well-formed, but made for another base model
├── AdapterNotFound       unknown, or not visible to this tenant: the text does not tell which
├── InUse                 an alias or a protection still points there
├── TenantFull            a tenant has as many versions as it may
├── GenerationMismatch    the alias moved since the caller looked
├── DataLoss              stored bytes no longer match their digest
├── NoStore               nobody made a store where one is looked for
├── OtherFormat           the store is of a format that is not read here
└── StoreUnavailable      the medium cannot be read or written now
    ├── UnsafeStore       it may lose what it acknowledged, and nobody said that this is fine
    └── UploadLost        the medium lost a part of a push, which is not published and never will be
"""


class AdapterStoreError(Exception):
    """Base of everything this package raises on purpose. The text names the part, and what to do."""


class InvalidRef(AdapterStoreError):
    pass


class InvalidModel(AdapterStoreError):
    pass


class InvalidAdapter(AdapterStoreError):
    pass


class WarningsRefused(InvalidAdapter):
    """`warnings`: reason and message of each."""

    def __init__(self, warnings: tuple[tuple[str, str], ...]) -> None:
        super().__init__(warnings)
        self.warnings = warnings

    def __str__(self) -> str:
        told = "; ".join(f"{reason}: {message}" for reason, message in self.warnings)
        return f"a strict push takes no warnings, and there are {len(self.warnings)}: {told}"


class IncompatibleAdapter(AdapterStoreError):
    pass


class AdapterNotFound(AdapterStoreError):
    pass


class InUse(AdapterStoreError):
    pass


class TenantFull(AdapterStoreError):
    pass


class GenerationMismatch(AdapterStoreError):
    pass


class DataLoss(AdapterStoreError):
    pass


class NoStore(AdapterStoreError):
    pass


class OtherFormat(AdapterStoreError):
    """`found`: the number of the format."""

    def __init__(self, message: str, found: int) -> None:
        super().__init__(message, found)
        self.found = found

    def __str__(self) -> str:
        return str(self.args[0])


class StoreUnavailable(AdapterStoreError):
    pass


class UnsafeStore(StoreUnavailable):
    pass


class UploadLost(StoreUnavailable):
    pass

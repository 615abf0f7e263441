"""What can go wrong in the executor.

ExecutorError
├── UnsupportedModel     config.json asks for maths that this executor does not have; names the field
└── BadCheckpoint        a file of the model folder is missing, damaged or does not fit; names file and tensor
"""


class ExecutorError(Exception):
    """Root of everything the executor raises on purpose."""


class UnsupportedModel(ExecutorError):
    """The model folder is well formed, but would compute other numbers here than its authors meant."""


class BadCheckpoint(ExecutorError):
    """The model folder cannot be read as what it claims to be."""

"""What can go wrong in the executor.

ExecutorError
├── UnsupportedModel     config.json asks for maths that this executor does not have; names the field
├── BadCheckpoint        the checkpoint's tensors do not fit the model; names file and tensor
├── StartError           a port or folder that the settings name cannot be used
├── RankLost             a rank of this executor ended or left the others; only a restart helps
├── AdapterLoadTimeout   the store takes too long
├── HostMemoryFull       an adapter that nobody waits for has no room in host memory
├── InvalidDispatch      a scheduler sent something that cannot run; names the field
└── ConstraintFailed     an answer cannot be held to its constraint any further
"""


class ExecutorError(Exception):
    """Root of everything the executor raises on purpose."""


class UnsupportedModel(ExecutorError):
    """The model folder is well formed, but would compute other numbers here than its authors meant."""


class BadCheckpoint(ExecutorError):
    """The checkpoint's tensors are not those of the model that config.json describes.

    A folder that cannot be read at all, by any service, is adapter_store's InvalidModel.
    """


class StartError(ExecutorError):
    """Settings that are well formed, but name something that is taken, missing or too small."""


class RankLost(ExecutorError):
    """The ranks are no longer at the same place of the same step: whatever runs, fails."""


class AdapterLoadTimeout(ExecutorError):
    """An adapter is still on its way from the store; it may be there at the next try."""


class HostMemoryFull(ExecutorError):
    """Whatever could be evicted for an adapter is needed more."""


class InvalidDispatch(ExecutorError):
    """A bug in a scheduler, or one that serves another model."""


class ConstraintFailed(ExecutorError):
    """One answer fails: its constraint takes too much to follow, or leaves nothing to go on with."""

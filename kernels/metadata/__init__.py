"""The description of one step for the kernels: which rows belong to which slot, in one buffer."""

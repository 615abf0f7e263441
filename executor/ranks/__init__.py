"""One model on several ranks, each a process: rank 0 plans and samples, the others follow it.

Rank 0 has a control pipe to every other rank, read in order between steps, and some lanes on which adapters
are loaded meanwhile. Tensors go between the ranks only within a step, by the collectives of the layers.
"""

"""One model on several ranks, each a process. Rank 0 plans, samples and serves; the others follow its
messages.

Rank 0 has a control pipe to every other rank, read in order between steps, and some lanes on which adapters
are loaded meanwhile. Tensors go between the ranks only within a step, by the collectives of the layers.
"""

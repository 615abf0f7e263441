"""`--load-format dummy`: random weights in a model's shapes, for speed runs without a checkpoint."""

import torch
from torch import nn

from executor.layers.norm import Norm

# As models are initialised: activations stay finite through any number of layers.
_SPREAD = 0.02


def fill_with_noise(model: nn.Module) -> None:
    """Equal for equal models on one kind of device."""
    for number, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            generator = torch.Generator(parameter.device).manual_seed(number)
            if isinstance(module, Norm):
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, _SPREAD, generator=generator)

"""LoRA over a plain model: slot layout, arena, images, the layers that wrap base layers, replacing."""

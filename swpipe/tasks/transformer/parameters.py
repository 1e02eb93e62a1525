"""Initial parameters that depend on the seed and their global names alone.

A chunk of a model has parameters of the same names as the whole model, so that its initial values
are the whole model's, bit for bit, whichever parts it has and in whichever order they are made.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

STD = 0.02
"""Standard deviation of initial weights (Radford et al., 2019)."""


def init_parameters(model: nn.Module, seed: int) -> None:
    """Set all parameters: biases 0, weights of norms 1, other weights normal. Draws nothing else.

    Args:
        model: With global names.
        seed: 0 or more.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                drawn = torch.empty(parameter.shape).normal_(0.0, STD, generator=generator)
                parameter.copy_(drawn)

"""What a trial saves: modules whose state cannot be saved are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelineTask
from swpipe._state.loop import LoopState
from swpipe.device import resolve
from swpipe.errors import UnsavedStateError
from swpipe.inference import record


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_torchscript_is_refused_whatever_it_is_a_part_of() -> None:
    """It keeps its state to itself; each module that has it is named, and no other."""
    plain = nn.Linear(1, 1)
    mixed = nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(1, 1))), nn.Linear(1, 1))

    with pytest.raises(UnsavedStateError, match=r"mixed \(Sequential\)") as caught:
        LoopState([], {"plain": plain, "mixed": mixed}, resolve("cpu"))
    assert "plain" not in str(caught.value)

    def train(ctx: IterContext) -> None:
        ctx.y = mixed(plain(ctx.batch))

    with pytest.raises(UnsavedStateError, match=r"TorchScript.*Sequential"):
        record([PipelineTask("train", train)], torch.ones(1, 1), device="cpu")

"""Loops with fully sharded parameters (FSDP2) run with shortcuts and continue unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swpipe._values.walk import inner_tensors, parts_of, record_stream
from tests.inference.helpers import process_group
from tests.shortcut.loops import NAMES, Loop, differing
from tests.support.ranks import Ranks

SHORTCUTS = (*((name,) for name in NAMES), ("embed", "forward"), ("backward", "step"))


class FullySharded(Loop):
    """A loop whose table and head are sharded over all ranks."""

    def table_and_head(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        table, head = super().table_and_head()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*list(head.children())[:1], head, table):
            fully_shard(module, mesh=mesh)
        return table, head


class Scaled(FullySharded):
    """A loop with a gradient scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(self, ctx: Any) -> None:
        self.scaler.scale(ctx.loss).backward()

    def step(self, ctx: Any) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def test_a_scaler_refuses_a_replayed_backward_and_nothing_differs(tmp_path: Path) -> None:
    """Sharding computes the gradients of its shards; a replay leaves none for the scaler.

    If the step is shortcut, too, they are not needed.
    """
    refused = []
    with process_group(tmp_path):
        for names in SHORTCUTS:
            try:
                assert differing(Scaled, [names]) == []
            except AssertionError as error:
                if "No inf checks were recorded" not in str(error):
                    raise
                refused.append(names)
    assert refused == [("backward",), ("embed", "forward")]


def of_sharded() -> list[tuple[str, ...]]:
    """Return the shortcuts after which training differs."""
    return differing(FullySharded, SHORTCUTS)


@pytest.mark.slow
def test_two_ranks_train_on_unchanged(two_ranks: Ranks) -> None:
    """Each task alone and some pairs are shortcut, with parameters on two ranks."""
    assert two_ranks.run(of_sharded) == [[], []]


def test_a_distributed_tensor_consists_of_its_local_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device mesh, which it also lists among its inner parts, is no tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    seen: list[Any] = []
    with process_group(tmp_path):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensor = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        (part,) = parts_of(tensor)
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: seen.append(stream))
        record_stream({"weight": tensor}, "a", "b")
        monkeypatch.undo()
        assert torch.equal(part, tensor.to_local())
        assert len(inner_tensors(tensor)) == 1
    assert seen == ["a", "b"]

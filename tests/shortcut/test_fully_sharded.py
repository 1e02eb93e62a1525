"""Loops with fully sharded parameters (FSDP2) run with shortcuts and train on unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swpipe._values.walk import inner_tensors, parts_of, record_stream
from tests.shortcut.loops import Loop, alone_and_in_pairs, differing
from tests.support.ranks import Ranks

NAMES = ("embed", "forward", "backward", "step")


class FullySharded(Loop):
    """Table and head are sharded over all ranks."""

    def table_and_head(self) -> tuple[nn.Module, nn.Module]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        table, head = super().table_and_head()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*list(head.children())[:1], head, table):
            fully_shard(module, mesh=mesh)
        return table, head


class Scaled(FullySharded):
    """With a gradient scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(self, ctx: Any) -> None:
        self.scaler.scale(ctx.loss).backward()

    def step(self, ctx: Any) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def of_sharded(pairs: bool = True) -> list[tuple[str, ...]]:
    """The shortcuts, alone and in pairs, after which training differs."""
    return differing(FullySharded, alone_and_in_pairs(NAMES)[: None if pairs else len(NAMES)])


def differing_or_refused_with_a_scaler() -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The same with a gradient scaler, and the shortcuts that it refuses."""
    differ, refused = [], []
    for names in (*((name,) for name in NAMES), ("embed", "forward"), ("backward", "step")):
        try:
            differ += differing(Scaled, [names])
        except AssertionError as error:
            if "No inf checks were recorded" not in str(error):
                raise
            refused.append(names)
    return differ, refused


def test_a_scaler_refuses_a_replayed_backward_and_nothing_differs(one_rank: Ranks) -> None:
    """Sharding computes the gradients of its shards itself; a replay leaves none for the scaler.

    With the step shortcut too, nobody asks for them.
    """
    ((differ, refused),) = one_rank.run(differing_or_refused_with_a_scaler)
    assert differ == []
    assert refused == [("backward",), ("embed", "forward")]


def test_one_rank_trains_on_unchanged(one_rank: Ranks) -> None:
    """Each task alone, on a group of one."""
    assert one_rank.run(of_sharded, False) == [[]]


@pytest.mark.slow
def test_two_ranks_train_on_unchanged(two_ranks: Ranks) -> None:
    """Each task alone and in pairs, with parameters on two ranks."""
    assert two_ranks.run(of_sharded) == [[], []]


def parts_of_a_dtensor() -> tuple[bool, int, list[str]]:
    """What a DTensor consists of, and which streams its memory is recorded on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    (part,) = parts_of(tensor)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: seen.append(stream))
        record_stream({"weight": tensor}, "a", "b")
    return torch.equal(part, tensor.to_local()), len(inner_tensors(tensor)), seen


def test_a_distributed_tensor_consists_of_its_local_tensor(one_rank: Ranks) -> None:
    """The device mesh, which it also lists among its inner parts, is no tensor."""
    assert one_rank.run(parts_of_a_dtensor) == [(True, 1, ["a", "b"])]

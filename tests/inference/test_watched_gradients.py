"""The knowledge of gradients that does not need ``parameter.grad``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swpipe._values.storages import Storages
from swpipe.device import resolve
from swpipe.inference.purity import UseRecorder
from swpipe.inference.watched_gradients import WatchedGradients
from tests.inference.helpers import process_group


def backward(model: nn.Module) -> UseRecorder:
    """Return a recorder that watched a backward."""
    recorder = UseRecorder(resolve("cpu"))
    with recorder:
        model(torch.ones(3, 4)).square().mean().backward()
    return recorder


def missed(model: nn.Module, recorder: UseRecorder) -> list[str]:
    """Return the parameters whose recorded gradient is missing, another tensor, or elsewhere."""
    return [
        name
        for name, parameter in model.named_parameters()
        if (found := recorder.accumulated.get(id(parameter))) is None
        or parameter.grad is None
        or found.tensor() is not parameter.grad
        or not Storages().of(parameter.grad) <= found.memory.keys()
    ]


def test_a_gradient_is_told_from_the_bucket_that_it_is_copied_to(tmp_path: Path) -> None:
    """DDP's hooks run operators while gradients are accumulated, also on whole buckets."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with process_group(tmp_path):
        parallel = DistributedDataParallel(model)
        for clear in (True, False, True):
            assert missed(model, backward(parallel)) == []
            if clear:
                model.zero_grad()


def test_the_last_of_several_gradients_counts_and_a_sparse_one_is_told_from_its_parts() -> None:
    """One task accumulates and clears several; autograd reads a sparse one's indices."""
    model, table = nn.Linear(4, 1), nn.EmbeddingBag(5, 3, sparse=True)
    recorder = UseRecorder(resolve("cpu"))
    with recorder:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
        table(torch.tensor([[1, 2]])).sum().backward()
    assert missed(model, recorder) == []
    assert missed(table, recorder) == []


@pytest.mark.parametrize("kept", [False, True])
def test_a_gradient_that_was_cleared_is_gone(kept: bool) -> None:
    """This holds if its memory is still in use, but not while the tensor itself is."""
    model = nn.Linear(4, 1)
    gradients = WatchedGradients(model.parameters())
    gradients.add(backward(model).accumulated)
    before = gradients.present()
    assert before.keys() == {id(one) for one in model.parameters()}
    assert gradients.gone(before) == set()
    views = [one.grad.detach() for one in model.parameters() if one.grad is not None and kept]
    model.zero_grad()
    assert gradients.gone(before) == before.keys()
    assert gradients.present() == {}
    assert len(views) == 2 * kept
    gradients.add(backward(model).accumulated)
    before, held = gradients.present(), [one.grad for one in model.parameters()]
    model.zero_grad()
    assert gradients.gone(before) == set()
    assert len(held) == 2


def test_a_gradient_is_cleared_although_something_else_keeps_it() -> None:
    """Any way to clear it counts, since the parameter's own gradient is compared."""
    parameter = nn.Parameter(torch.ones(2))
    kept = parameter.grad = torch.ones(2)
    watched = WatchedGradients([parameter])
    before = watched.present()
    assert watched.gone(before) == set()
    parameter.grad = None
    watched.read()
    assert watched.gone(before) == {id(parameter)}
    assert watched.present() == {}
    parameter.grad = kept
    watched.read()
    assert watched.present().keys() == {id(parameter)}

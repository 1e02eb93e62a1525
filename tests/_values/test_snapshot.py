"""State is restored bit for bit, in the same objects."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe._values.snapshot import Snapshot
from swpipe._values.stateful import Owner
from swpipe.device import CpuDevice


def snapshot_of(*owners: Any) -> Snapshot:
    """Return a snapshot of owners with arbitrary names."""
    return Snapshot([Owner(f"owner {i}", owner) for i, owner in enumerate(owners)], CpuDevice())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train for a few steps on random inputs."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def net() -> nn.Sequential:
    """Return a module with parameters, buffers and a counter."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize(
    ("kind", "before"), [("sgd", 0), ("sgd", 2), ("adam", 0), ("adam", 2), ("adagrad", 0)]
)
def test_model_and_optimizer(kind: str, before: int) -> None:
    """Parameters, buffers, gradients and the optimizer's state are restored, old or new.

    They can be restored repeatedly, as for several batches that are profiled from one state.
    """
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, before)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [copy.deepcopy(p.grad) for p in model.parameters()]
    snapshot = snapshot_of(model, optimizer)
    for _ in range(2):
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        assert not equal(state[0], model.state_dict())
        snapshot.restore()
        assert equal(list(state), [model.state_dict(), optimizer.state_dict()])
        assert equal(gradients, [p.grad for p in model.parameters()])


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer's state by an empty one."""
    optimizer.state = defaultdict(dict)


def new_groups(optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer's parameter groups."""
    optimizer.param_groups = [group | {"lr": 0.5} for group in optimizer.param_groups]


def load(optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's own state."""
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("replace", [forget, new_groups, load])
def test_containers_of_an_optimizer_that_were_replaced(
    replace: Callable[[torch.optim.Optimizer], None], before: int
) -> None:
    """The old containers were refilled, and the optimizer continued with the new ones."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, before)
    state, held = copy.deepcopy(optimizer.state_dict()), optimizer.state
    snapshot = snapshot_of(model, optimizer)
    replace(optimizer)
    train(model, optimizer)
    snapshot.restore()
    assert equal(state, optimizer.state_dict())
    assert optimizer.state is held


def test_tensors_keep_identity_and_memory() -> None:
    """Parameters, gradients, buffers and moments are the same objects at the same place."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters()], *moments]
    places = [(id(tensor), tensor.data_ptr()) for tensor in held]
    snapshot = snapshot_of(model, optimizer)

    train(model, optimizer)
    with torch.no_grad():
        model[0].weight.data = torch.zeros(4, 3)
    model[1].running_mean = torch.zeros(4)
    snapshot.restore()

    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters()], *moments]
    assert places == [(id(tensor), tensor.data_ptr()) for tensor in held]


def test_tensors_that_a_parameter_has_as_attributes() -> None:
    """A gradient in another precision, for example, is the same tensor, with its values."""
    model = nn.Linear(1, 1)
    kept = model.weight.main_grad = torch.zeros(1)
    model.weight.history = [torch.zeros(1)]
    snapshot = snapshot_of(model)
    for tensor in (kept, *model.weight.history):
        tensor.add_(1)
    model.weight.main_grad = torch.ones(1)
    snapshot.restore()
    assert model.weight.main_grad is kept
    assert [kept.item(), model.weight.history[0].item()] == [0.0, 0.0]


def test_a_gradient_that_was_there_keeps_its_bits() -> None:
    """This holds also if the steps in between accumulate into it in place."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    snapshot = snapshot_of(model)
    model(torch.ones(1, 2)).sum().backward()
    assert gradient is not None
    assert gradient.tolist() == [[2.0, 2.0]]
    snapshot.restore()
    assert model.weight.grad is gradient
    assert gradient.tolist() == [[1.0, 1.0]]


def test_a_sparse_gradient() -> None:
    """Embeddings have sparse gradients, which are zeroed in place."""
    table = nn.Embedding(10, 2, sparse=True)
    table(torch.tensor([3])).sum().backward()
    gradient = table.weight.grad
    snapshot = snapshot_of(table)
    assert gradient is not None
    gradient.zero_()
    table.weight.grad = None
    snapshot.restore()
    assert table.weight.grad is gradient
    assert gradient.to_dense()[3].tolist() == [1.0, 1.0]


def test_flags_and_what_is_absent() -> None:
    """A model half in eval mode and frozen is restored; an absent buffer is absent again."""
    model = net()
    model[1].eval().requires_grad_(False)
    empty = nn.Module()  # without any tensor to begin with
    empty.register_buffer("scale", None)
    snapshot = snapshot_of(model, empty)
    model.eval().requires_grad_(True)
    model[1].train()
    empty.scale = torch.ones(1)
    snapshot.restore()
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [True] * 2 + [False] * 2 + [True] * 2
    assert empty.scale is None


def test_the_device_is_synchronized() -> None:
    """This happens before the state is copied, and before memory in use is overwritten."""

    class SlowDevice(CpuDevice):
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    device = SlowDevice()
    snapshot = Snapshot([], device)
    assert device.waits == 1
    snapshot.restore()
    assert device.waits == 2


class Odd(nn.Module):
    """A module with tensors in all places where modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("absent", None)
        self.register_buffer("expanded", torch.ones(1, 1).expand(3, 3))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.total = torch.zeros(2)
        self.history = [torch.zeros(1)]
        self.hidden = [nn.Linear(1, 1)]
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_tensors_outside_the_state_dict() -> None:
    """These are plain attributes, lists, non-persistent buffers, modules in lists, extra state."""
    odd = Odd()
    kept, weight = odd.total, odd.hidden[0].weight.clone()
    snapshot = snapshot_of(odd)

    odd.absent, odd.scale = torch.ones(1), 3.0
    odd.passing += 1
    odd.total.add_(1)
    odd.total = odd.total + 1
    odd.history[0] += 1
    odd.history.append(torch.ones(1))
    with torch.no_grad():
        odd.hidden[0].weight.zero_()
    snapshot.restore()

    assert (odd.absent, odd.scale) == (None, 1.0)
    assert odd.passing.tolist() == [1.0]
    assert odd.total is kept
    assert kept.tolist() == [0.0, 0.0]
    assert [t.tolist() for t in odd.history] == [[0.0]]
    assert torch.equal(odd.hidden[0].weight, weight)
    assert odd.expanded.tolist() == [[1.0] * 3] * 3


def test_a_tensor_that_became_part_of_a_graph_is_a_leaf_again() -> None:
    """An example is a running sum over losses that were not detached."""
    odd = Odd()
    snapshot = snapshot_of(odd)
    odd.total.add_(torch.ones(2, requires_grad=True))
    snapshot.restore()
    assert odd.total.is_leaf
    assert not odd.total.requires_grad


def test_parameters_of_a_lazy_module_stay() -> None:
    """There was nothing to save, and nothing fails."""
    lazy = nn.LazyLinear(2)
    snapshot = snapshot_of(lazy)
    lazy(torch.ones(1, 3))
    snapshot.restore()
    assert lazy.weight.shape == (2, 3)


def test_what_is_registered_at_the_first_batch_stays() -> None:
    """The flag that says so is not restored either: TorchRec's modules work like this."""

    class Permuting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.register_buffer("permutation", torch.tensor([1, 0]))
                self.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
                self.ready = True
            return x[self.permutation] * self.scale

    module = Permuting()
    snapshot = snapshot_of(module)
    module(torch.ones(2))
    snapshot.restore()
    assert torch.equal(module(torch.tensor([3.0, 5.0])), torch.tensor([10.0, 6.0]))


def test_anything_with_a_state_dict() -> None:
    """A learning rate scheduler is an example."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    state = copy.deepcopy(scheduler.state_dict())
    snapshot = snapshot_of(scheduler, optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    snapshot.restore()
    assert scheduler.state_dict() == state
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_an_object_that_keeps_what_it_loads_is_restored_each_time() -> None:
    """It gets its own copy: what it changes there does not change the saved state."""

    class Log:
        def __init__(self) -> None:
            self.lines: dict[str, list[int]] = {"lines": [1]}

        def state_dict(self) -> dict[str, list[int]]:
            return self.lines

        def load_state_dict(self, state: dict[str, list[int]]) -> None:
            self.lines = state

    log = Log()
    snapshot = snapshot_of(log)
    for line in (2, 3):
        log.lines["lines"].append(line)
        snapshot.restore()
        assert log.lines == {"lines": [1]}


def test_a_state_that_cannot_be_copied_is_reported() -> None:
    """The error names the object and a workaround."""

    class Stubborn:
        def state_dict(self) -> Any:
            return {"lines": (line for line in ())}

        def load_state_dict(self, state: Any) -> None:
            return None

    with pytest.raises(TypeError) as caught:
        snapshot_of(Stubborn())
    assert "owner 0 (Stubborn)" in caught.value.__notes__[0]
    assert "state=[model, optimizer]" in caught.value.__notes__[0]


def test_generators() -> None:
    """These are the default ones of torch, Python and numpy, and the tasks' own."""
    numpy = pytest.importorskip("numpy")
    mine, own = torch.Generator().manual_seed(1), random.Random(1)
    new, old = numpy.random.default_rng(1), numpy.random.RandomState(1)

    def draw() -> tuple[float, ...]:
        default = torch.rand(1).item(), random.random(), numpy.random.random()
        theirs = torch.rand(1, generator=mine).item(), own.random(), new.random(), old.random()
        return *default, *theirs

    snapshot = snapshot_of(mine, own, new, old)
    first = draw()
    draw()
    snapshot.restore()
    assert draw() == first


def test_inference_tensors() -> None:
    """Tensors made in inference mode can be put back outside of it."""
    with torch.inference_mode():
        model = nn.Linear(1, 1)
    weight = model.weight.clone()
    snapshot = snapshot_of(model)
    with torch.inference_mode():
        model.weight.zero_()
    snapshot.restore()
    assert torch.equal(model.weight, weight)


def test_a_buffer_that_is_registered_at_the_first_batch_stays_beside_others() -> None:
    """An example is the cache of a rotary embedding: its flag is not restored either."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))
            self.ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.register_buffer("cache", torch.ones(2))
                self.ready = True
            return x * self.cache * self.scale.add_(1)

    module = Caching()
    snapshot = snapshot_of(module)
    module(torch.ones(2))
    snapshot.restore()
    assert torch.equal(module(torch.ones(2)), torch.tensor([3.0, 3.0]))

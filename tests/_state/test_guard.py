"""What a snapshot does not have is not trained twice."""

from __future__ import annotations

import _thread
import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swpipe._state.guard import TrainingGuard
from swpipe._state.loop import LoopState
from swpipe._values.owners import Owner, Owners, given_state
from swpipe._values.snapshot import Snapshot
from swpipe.core.task import PipelineTask
from swpipe.device import CpuDevice
from swpipe.errors import UnsavedStateError


class Trainer:
    """A model and its optimizer, and one iteration."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.table = torch.zeros(3)

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()

    def update_by_hand(self) -> None:
        self.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.1)

    def count(self) -> None:
        self.table[1] += 1


def guarded(fn: Callable[..., object], state: Any = None, windows: int = 3) -> int:
    """Run a task in windows with state restored between them; how many were run."""
    task = PipelineTask("t", fn)
    snapshot = Snapshot(given_state([] if state is None else state), CpuDevice())
    for _ in range(windows):
        try:
            with TrainingGuard(snapshot):
                task.fn(SimpleNamespace())
        finally:
            snapshot.restore()
    return windows


def test_parameters_outside_of_the_snapshot_are_not_trained() -> None:
    """The optimizer is known, its model is not: parameters are named."""
    trainer = Trainer()
    before = copy.deepcopy(trainer.model.state_dict())
    other = torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
    snapshot = Snapshot(given_state([other, trainer.model]), CpuDevice())
    late = nn.Parameter(torch.ones(2))
    other.add_param_group({"params": [late]})
    with TrainingGuard(snapshot):
        other.param_groups.pop()
        other.step()
        other.add_param_group({"params": [late]})
        with pytest.raises(UnsavedStateError, match=r"SGD updates parameters.*shape \(2,\)"):
            other.step()
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))


def test_an_optimizer_without_a_state_may_step_on_what_is_restored() -> None:
    """Its model is found, and it is not: afterwards it has no state again, and its options."""
    trainer = Trainer()
    model = trainer.model

    def train(ctx: Any) -> None:
        assert not trainer.optimizer.state
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        trainer.optimizer.step()
        trainer.optimizer.param_groups[0]["lr"] *= 0.5

    before = copy.deepcopy(model.state_dict())
    assert guarded(train, [model]) == 3
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1
    assert not trainer.optimizer.state


def test_an_optimizer_that_a_task_makes_each_time() -> None:
    """It trains what is restored, and nothing of it stays."""
    model = Trainer().model

    def fit(ctx: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    before = copy.deepcopy(model.state_dict())
    assert guarded(fit, [model]) == 3
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize("kind", ["stepped", "scheduled"])
def test_an_optimizer_that_is_not_restored_does_not_step(kind: str) -> None:
    """It has moments, or a scheduler, which would not be restored."""
    trainer = Trainer()
    model = trainer.model
    if kind == "stepped":
        trainer.train()
    else:
        torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    before = copy.deepcopy(model.state_dict())

    def train(ctx: Any) -> None:
        model(torch.ones(1, 2)).sum().backward()
        trainer.optimizer.step()

    with pytest.raises(UnsavedStateError, match=r"step of an optimizer.*SGD.*state=\[") as caught:
        guarded(train, [model])
    assert caught.value.names == ("SGD",)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_another_thread_trains_what_it_likes() -> None:
    """Its optimizers are nobody's business."""
    trainer, other = Trainer(), Trainer()
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            other.train()
        except BaseException as error:  # noqa: BLE001 - the assertion shows it
            failed.append(error)

    def train(ctx: Any) -> None:
        trainer.train()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    snapshot = Snapshot(given_state([trainer.model, trainer.optimizer]), CpuDevice())
    with TrainingGuard(snapshot):
        train(None)
    assert failed == []
    assert other.optimizer.state


def test_parameters_updated_without_an_optimizer_are_noticed() -> None:
    """Before the second window."""
    trainer = Trainer()
    with pytest.raises(UnsavedStateError, match=r"modify tensors in place.*Linear\.weight"):
        guarded(lambda ctx: trainer.update_by_hand())


def test_a_step_on_a_thread_that_python_did_not_start_counts() -> None:
    """Autograd's threads for a device run hooks that may step, and have nobody's variables."""
    trainer, refused, done = Trainer(), [], threading.Event()

    def of_autograd() -> None:
        try:
            trainer.train()
        except UnsavedStateError as error:
            refused.append(error)
        done.set()

    with TrainingGuard(Snapshot([], CpuDevice())):
        _thread.start_new_thread(of_autograd, ())
        assert done.wait(60)
    assert len(refused) == 1
    assert not trainer.optimizer.state


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = [("", inner)]
        self.defaults = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self._inner[0][1].param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return dict(self._inner[0][1].state)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._inner[0][1].step(closure)


class WithStateDict:
    """An object that restores model and optimizer by itself."""

    def __init__(self, trainer: Trainer) -> None:
        self._model, self._optimizer = trainer.model, trainer.optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"m": self._model.state_dict(), "o": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["m"])
        self._optimizer.load_state_dict(state["o"])


def test_an_optimizer_in_a_restored_one_is_restored() -> None:
    """With the state that its first step makes."""
    trainer = Trainer()
    wrapper = Wrapper(trainer.optimizer)

    def train(ctx: Any) -> None:
        trainer.backward()
        wrapper.step()

    assert guarded(train, [trainer.model, wrapper]) == 3
    assert not trainer.optimizer.state


def test_an_object_that_restores_its_optimizer_is_trusted() -> None:
    """Its state_dict need not hold the same tensors."""
    trainer = Trainer()
    snapshot = Snapshot(given_state([WithStateDict(trainer)]), CpuDevice())
    with TrainingGuard(snapshot):
        trainer.train()


def test_modules_that_an_object_restores_are_trusted() -> None:
    """Their parameters may be modified."""
    trainer = Trainer()
    owner = WithStateDict(trainer)
    owner.restored_modules = (trainer.model,)  # type: ignore[attr-defined]
    assert guarded(lambda ctx: trainer.update_by_hand(), [owner]) == 3


def test_tensors_without_version_counters_are_left_out() -> None:
    """Those made in inference mode cannot be watched."""
    trainer = Trainer()
    with torch.inference_mode():
        trainer.model.register_buffer("table", torch.zeros(3))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    guarded(lambda ctx: (trainer.model(torch.ones(1, 2)), optimizer.zero_grad()))


def test_what_was_only_shown_is_added_to() -> None:
    """An optimizer that steps later is saved then, with its parameters; not if it is scheduled."""
    trainer = Trainer()
    trainer.train()
    before = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))
    for _ in range(2):
        snapshot = Snapshot([], CpuDevice())
        with TrainingGuard(snapshot, adds=True):
            trainer.train()
            trainer.train()
        snapshot.restore()
        after = trainer.model.state_dict(), trainer.optimizer.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    with pytest.raises(UnsavedStateError, match=r"step a scheduler.*state=\[model, optimizer, sch"):
        LoopState([], Owners([Owner("SGD", trainer.optimizer)]), CpuDevice())
    with (
        pytest.raises(UnsavedStateError, match="step a scheduler"),
        TrainingGuard(Snapshot([], CpuDevice()), adds=True),
    ):
        trainer.train()


def test_lazy_parameters_may_be_trained() -> None:
    """They are initialized after the snapshot, and keep what they became."""
    model = nn.LazyLinear(1)
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(ctx: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    snapshot = Snapshot(given_state([model, optimizer]), CpuDevice())
    with TrainingGuard(snapshot):
        train(None)

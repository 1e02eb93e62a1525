"""Optimizers that step in a trial are restored, given or not; others are refused."""

from __future__ import annotations

import _thread
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swpipe import DeclaredIO, PipelineTask
from swpipe._state.loop import LoopState
from swpipe._values.stateful import Owner, Owners
from swpipe.device import CpuDevice
from swpipe.errors import UnsavedStateError
from swpipe.inference import record


class Trainer:
    """A model and its optimizer, with one training step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()


def tried(fn: Callable[..., object], state: Any = (), windows: int = 3) -> int:
    """Run a task in windows, each of which is restored; return their number."""
    saved = LoopState([], state, CpuDevice())
    for _ in range(windows):
        with saved.trial():
            fn(SimpleNamespace())
    return windows


def test_a_task_may_change_what_a_trial_has_restored() -> None:
    """Each trial restores its own copy, so that the next trial begins in the same state."""
    state = SimpleNamespace(log=["before"])
    io = DeclaredIO(lambda: state.log, lambda log: setattr(state, "log", log))
    saved = LoopState([PipelineTask("log", print, [io])], [], CpuDevice())
    for _ in range(2):
        with saved.trial():
            state.log.append("in a trial")
    assert state.log == ["before"]


def test_an_optimizer_that_is_only_shown_later_is_put_back() -> None:
    """Its state, options and parameters are restored, no matter what steps it."""
    trainer = Trainer()
    trainer.train()  # now it has moments
    before = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))

    def train(ctx: Any) -> None:
        trainer.train()
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
        trainer.train()

    for state in ([], [Owner("Linear", trainer.model)]):
        assert tried(train, Owners(state)) == 3
        after = trainer.model.state_dict(), trainer.optimizer.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_an_optimizer_that_was_left_out_does_not_step() -> None:
    """The user has said what is restored: it raises before the first step, and says what to add."""
    trainer = Trainer()
    trainer.train()
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(UnsavedStateError, match=r"step of an optimizer.*SGD\. Add it to state=: "):
        tried(lambda ctx: trainer.train(), [trainer.model])
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))
    assert tried(lambda ctx: trainer.train(), [trainer.model, trainer.optimizer]) == 3


def test_an_optimizer_without_a_state_may_step_on_what_is_restored() -> None:
    """Its model is restored, and it is not: it has no state again, and its options."""
    trainer = Trainer()
    model = trainer.model

    def train(ctx: Any) -> None:
        assert not trainer.optimizer.state
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        trainer.optimizer.step()
        trainer.optimizer.param_groups[0]["lr"] *= 0.5

    before = copy.deepcopy(model.state_dict())
    assert tried(train, [model]) == 3
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1
    assert not trainer.optimizer.state


def test_an_optimizer_that_a_task_makes_each_time() -> None:
    """It trains a restored model, and leaves nothing behind."""
    model = Trainer().model
    made: list[weakref.ref[Any]] = []

    def fit(ctx: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        made.append(weakref.ref(optimizer))

    before = copy.deepcopy(model.state_dict())
    saved = LoopState([], [model], CpuDevice())
    with saved.trial():
        for _ in range(3):
            fit(None)
        gc.collect()
        assert [one() for one in made] == [None] * 3
        assert not saved._snapshot._added
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_an_optimizer_with_a_scheduler_of_which_nothing_is_known_does_not_step() -> None:
    """A task may step the scheduler, which nothing shows: it raises before the first step."""
    trainer = Trainer()
    model = trainer.model
    torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    before = copy.deepcopy(model.state_dict())

    def train(ctx: Any) -> None:
        trainer.train()

    with pytest.raises(UnsavedStateError, match=r"step a scheduler.*state=\[model, opt") as caught:
        tried(train, [model])
    assert caught.value.names == ("the scheduler of SGD",)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    with pytest.raises(UnsavedStateError, match="step a scheduler"):
        LoopState([], Owners([Owner("SGD", trainer.optimizer)]), CpuDevice())
    assert tried(train, [model, trainer.optimizer]) == 3


def test_another_thread_trains_what_it_likes() -> None:
    """The optimizers of another thread are not watched."""
    trainer, other = Trainer(), Trainer()
    with LoopState([], [trainer.model, trainer.optimizer], CpuDevice()).trial():
        trainer.train()
        thread = threading.Thread(target=other.train)
        thread.start()
        thread.join()
    assert other.optimizer.state


def test_a_step_on_a_thread_that_python_did_not_start_counts() -> None:
    """Autograd's threads for a device run hooks that may step, and have no context variables."""
    trainer, done = Trainer(), threading.Event()
    before = copy.deepcopy(trainer.model.state_dict())

    def of_autograd() -> None:
        trainer.train()
        done.set()

    with LoopState([], [], CpuDevice()).trial():
        _thread.start_new_thread(of_autograd, ())
        assert done.wait(60)
        assert trainer.optimizer.state
    assert not trainer.optimizer.state
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another one."""

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
    """An object whose state contains that of a model and an optimizer."""

    def __init__(self, trainer: Trainer) -> None:
        self._model, self._optimizer = trainer.model, trainer.optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"m": self._model.state_dict(), "o": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["m"])
        self._optimizer.load_state_dict(state["o"])


def test_an_optimizer_in_a_restored_object_is_restored() -> None:
    """The object may be an optimizer, with the state that its first step makes.

    Another object is trusted, also with a scheduler; its state_dict may hold other tensors.
    """
    trainer = Trainer()
    wrapper = Wrapper(trainer.optimizer)

    def train(ctx: Any) -> None:
        trainer.backward()
        wrapper.step()

    assert tried(train, [trainer.model, wrapper]) == 3
    assert not trainer.optimizer.state
    torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    with LoopState([], [WithStateDict(trainer)], CpuDevice()).trial():
        trainer.train()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_torchscript_is_refused_whatever_it_is_a_part_of() -> None:
    """It hides its state; each module that contains it is named, and no other."""
    plain = nn.Linear(1, 1)
    mixed = nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(1, 1))), nn.Linear(1, 1))

    with pytest.raises(UnsavedStateError, match=r"mixed \(Sequential\)") as caught:
        LoopState([], {"plain": plain, "mixed": mixed}, CpuDevice())
    assert "plain" not in str(caught.value)

    def train(ctx: Any) -> None:
        ctx.y = mixed(plain(ctx.batch))

    with pytest.raises(UnsavedStateError, match=r"TorchScript.*Sequential"):
        record([PipelineTask("train", train)], torch.ones(1, 1), device="cpu")

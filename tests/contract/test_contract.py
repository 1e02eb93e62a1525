"""Every way to run a training gives the results of its plain loop, whatever happens on the way.

A program is a list of acts: a number of steps, leaving a pass, an evaluation in mid-pass, a
checkpoint from which a new process continues, a failure, a task whose outputs are replayed. The
plain loop is never stopped: it has no checkpoint. Losses, errors, ends of passes, parameters and
the default generator's state must be equal, bit for bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.contract.training import (
    BATCHES,
    ROWS,
    Failure,
    PlainLoop,
    Planned,
    Stumbled,
    Training,
    through_a_file,
)
from tests.contract.ways import WAYS, Way
from tests.support.budget import examples


@dataclass(frozen=True)
class Act:
    """One act of a program, with its argument, if any.

    "steps" has their number; "fail" a ``Failure``; "stumble" the row of the batch that the iterator
    loses by an error, and the number of steps after which the pipeline is drained.
    """

    what: str
    of: Any = None


ACTS = st.one_of(
    st.builds(Act, st.just("steps"), st.integers(1, 9)),
    st.builds(
        Act,
        st.just("fail"),
        st.builds(Failure, st.sampled_from(["loader", "decode", "step"]), st.integers(0, ROWS - 1)),
    ),
    st.builds(
        Act, st.just("stumble"), st.tuples(st.integers(0, ROWS - 1), st.integers(0, BATCHES))
    ),
    st.sampled_from([Act(what) for what in ("leave", "evaluate", "resume", "drain", "replay")]),
)
WITH_A_PASS = ("steps", "leave", "fail", "stumble")
PHASES = (Phase.generate,)
"""The most phases of a program. It is short, since shrinking takes longer than reading it."""

PROGRAMS = st.lists(ACTS, min_size=1, max_size=8)


class Trial:
    """A program, run by swpipe and then by the plain loop, which repeats it act by act.

    Args:
        kind: The way to run.
        loader: The name of its loader, or what makes it.
        then: The way in which it is resumed; None for the same.
    """

    def __init__(self, kind: type[Way], loader: Any, then: type[Way] | None) -> None:
        self._kind, self._loader = kind, loader
        self._then = then or kind
        self.found: list[Any] = []
        self.resumed_at: set[int] = set()  # acts before which a pass was resumed and not begun

    def _training(self) -> Training:
        return Training(self._loader, draws=self._kind.draws and self._then.draws)

    def by_swpipe(self, program: list[Act]) -> dict[str, Any]:
        """Run the program, record the result of each act, and return the final state."""
        way = self._kind(self._training())
        seed(2)
        replayed = failed = resumed = False
        for number, act in enumerate(program):
            if resumed:
                self.resumed_at.add(number)
            if way.drains and act.what not in WITH_A_PASS:
                self.found.append(way.drain())
            if act.what == "steps":
                self.found.append([way.next() for _ in range(act.of)])
                failed = resumed = False
            elif act.what == "fail" and self._can_fail(act.of, number):
                way.leave()
                self.found.append(_until_it_fails(way, act.of))
                resumed = False
                failed = any(isinstance(loss, str) for loss in self.found[-1])
            elif act.what == "stumble" and self._can_stumble(number):
                way.leave()
                self.found.append(_past_the_error(way, *act.of))
                resumed = failed = False
            elif act.what == "leave":
                way.leave()
            elif act.what == "evaluate":
                self.found.append(way.training.evaluate())
            elif act.what == "replay" and way.replays:
                replayed = not replayed
                way.replay(replayed)
            elif act.what == "resume" and failed:
                self._is_refused_or_saved(way)
            elif act.what == "resume" and not replayed:
                way = self._resumed(way)
                resumed = True
        way.leave()
        way.close()
        return _end(way.training)

    def _is_refused_or_saved(self, way: Way) -> None:
        """Save, unless that is refused since a failure has dropped iterations in mid-pass."""
        try:
            way.state_dict()
        except RuntimeError as refused:
            if "were dropped by a failure" not in str(refused):
                raise

    def _resumed(self, way: Way) -> Way:
        """Resume from a checkpoint, as a new process with other random states would."""
        saved = way.state_dict(), way.training.state_dict()
        draws = torch.get_rng_state()
        saved = through_a_file(saved)
        way.leave()
        way.close()
        training = self._training()
        seed(99)
        training.load_state_dict(saved[1])
        way = self._then(training)
        torch.set_rng_state(draws)
        way.load_state_dict(saved[0])
        return way

    def by_plain_loop(self, program: list[Act]) -> dict[str, Any]:
        """Check the recorded results against a plain loop, and return its final state."""
        plain = PlainLoop(self._training())
        seed(2)
        found = iter(self.found)
        for number, act in enumerate(program):
            if self._kind.drains and act.what not in WITH_A_PASS:
                drained = next(found)
                assert_equal([plain.next() for _ in drained], drained, act)
            if act.what == "steps":
                assert_equal([plain.next() for _ in range(act.of)], next(found), act)
            elif act.what == "fail" and self._can_fail(act.of, number):
                self._leave(plain, number)
                assert_equal(_until_it_fails(plain, act.of), next(found), act)
            elif act.what == "stumble" and self._can_stumble(number):
                plain.leave()
                assert_equal(_past_the_error(plain, *act.of), next(found), act)
            elif act.what == "leave":
                self._leave(plain, number)
            elif act.what == "evaluate":
                assert_equal([plain.training.evaluate()], [next(found)], act)
            elif act.what == "replay" and self._kind.replays:
                plain.replayed = [] if plain.replayed is None else None
        return _end(plain.training)

    def _leave(self, plain: PlainLoop, number: int) -> None:
        """Leave the pass, unless it was resumed and has not begun: the next pass is its rest."""
        if number not in self.resumed_at:
            plain.leave()

    def _can_stumble(self, number: int) -> bool:
        return self._kind.goes_on and number not in self.resumed_at

    def _can_fail(self, failure: Failure, number: int) -> bool:
        if failure.where == "loader":
            if self._loader == "workers":
                return False  # they have a copy of what says so
            if number in self.resumed_at:
                return False  # a row before the place would fail, which is read once more
        return failure.where in self._kind.fails


def _until_it_fails(of: Way | PlainLoop, failure: Failure) -> list[Any]:
    """Run a pass that fails at a row; return the losses and the error."""
    of.training.failing.at = failure
    found: list[Any] = []
    try:
        while (loss := of.next()) is not None:
            found.append(loss)
    except Planned as error:
        found.append(str(error))
    of.training.failing.at = None
    return found


def _past_the_error(of: Way | PlainLoop, row: int, drain_after: int) -> list[Any]:
    """Run a pass whose iterator raises instead of a batch; return losses and the error."""
    of.training.failing.stumbles_at = row
    found: list[Any] = []
    while (outcome := of.next()) is not None:
        found.append(str(outcome) if isinstance(outcome, Stumbled) else outcome)
        if len(found) == drain_after and isinstance(of, Way) and of.drains:
            found += of.drain()
    of.training.failing.stumbles_at = None
    return found


def seed(number: int) -> None:
    """Seed all default generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _end(training: Training) -> dict[str, Any]:
    return {"parts": training.state_dict(), "draws": torch.get_rng_state()}


def assert_equal(wanted: Any, found: Any, act: Act) -> None:
    """Check that structures are equal, and tensors bit for bit."""
    wanted_leaves, wanted_tree = pytree.tree_flatten(wanted)
    found_leaves, found_tree = pytree.tree_flatten(found)
    assert found_tree == wanted_tree, act
    for a, b in zip(wanted_leaves, found_leaves, strict=True):
        same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert same, (act, a, b)


KINDS: tuple[type[Way], ...] = WAYS
if find_spec("torchrec"):
    from tests.contract.torchrec_ways import NAMED

    KINDS = (*WAYS, *NAMED)
CASES = [(kind, loader) for kind in KINDS for loader in kind.loaders]
EXAMPLES, FEW = 10, 3
"""The number of programs that each way runs; few where processes are started."""


def check(kind: type[Way], loader: Any, program: list[Act], then: type[Way] | None = None) -> None:
    """Run one program by swpipe and by the plain loop, and compare."""
    trial = Trial(kind, loader, then)
    end = trial.by_swpipe(program)
    assert_equal(trial.by_plain_loop(program), end, Act("end"))


@pytest.mark.examples
@pytest.mark.filterwarnings(
    "ignore:nothing runs ahead", "ignore:the loop, a task or its body, draws"
)
@pytest.mark.parametrize(("kind", "loader"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_a_way_to_run_does_what_the_plain_loop_does(kind: type[Way], loader: str) -> None:
    """This holds for any program of calls."""

    def programs(program: list[Act]) -> None:
        check(kind, loader, program)

    # What is drawn depends on the name: each way has programs of its own.
    programs.__name__ = f"{kind.__name__}_{loader}".replace(" ", "_")
    number = FEW if loader == "workers" else EXAMPLES
    examples("loops", number, phases=PHASES)(given(PROGRAMS)(programs))()

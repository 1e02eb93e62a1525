"""``swpipe.overlap``: ordinary loops run overlapped, and give the numbers of the plain loop."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

import swpipe
from swpipe import PipelineTask
from swpipe.errors import PlanError
from swpipe.trace import Observer
from tests.loops.ordinary_loops import LOOPS, Loop, StopTraining, Training, batches

# Told of any loader that draws in this process; test_overlapping looks at it.
pytestmark = pytest.mark.filterwarnings("ignore:the loader draws from")

CURRICULA = {"a curriculum", "a curriculum in a generator", "a curriculum in a map"}
"""The loader reads what a task changes: nobody can honestly say that it is pulled ahead."""

NOT_PURE = {"a cache of the module"}
"""Here, decode keeps something."""

APART = {"a list", "a loader with workers", "persistent workers"}
"""The loader runs ahead without a word."""


def made(name: str) -> Loop:
    """The loop, with the generators as at the beginning of a script."""
    torch.manual_seed(11)
    random.seed(11)
    return LOOPS[name]()


def plain(loop: Loop) -> Iterator[Any]:
    """One pass of a plain loop."""
    for batch in loop.loader:
        ctx = SimpleNamespace(batch=batch, iter_idx=loop.count)  # type: ignore[attr-defined]
        for function in loop.functions:
            function(ctx)
        loop.count += 1  # type: ignore[attr-defined]
        yield ctx


def run(loop: Loop, passes: Iterable[Iterable[Any]]) -> list[Any]:
    """Run the loop's body on each context; returns the losses, and all that the loop leaves."""
    losses = []
    try:
        for contexts in passes:
            for ctx in contexts:
                losses.append(ctx.loss.detach().clone())
                loop.body(ctx)
            loop.after_epoch()
    except StopTraining:
        contexts.close()  # type: ignore[attr-defined]
    return [losses, loop.state()]


def run_plain(loop: Loop) -> list[Any]:
    """As a plain loop."""
    loop.count = 0  # type: ignore[attr-defined]
    return run(loop, (plain(loop) for _ in range(loop.epochs)))


def run_overlapped(loop: Loop, **options: Any) -> list[Any]:
    """With one call more."""
    with swpipe.overlap(loop.loader, loop.functions, device="cpu", **options) as overlapped:
        return run(loop, (iter(overlapped) for _ in range(loop.epochs)))


def declared(name: str) -> tuple[Loop, dict[str, Any]]:
    """The loop, and the arguments, with all that its author can say."""
    loop = made(name)
    if name not in NOT_PURE:
        loop.functions[0] = swpipe.task(name="decode", pure=True)(loop.functions[0])
    return loop, {} if name in APART else {"pull_ahead": True}


def plain_numbers(name: str) -> list[Any]:
    """All that the plain loop has, and what the generators draw next."""
    return [run_plain(made(name)), torch.rand(1), random.random()]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_which_nothing_is_said_has_the_numbers_of_the_plain_one(name: str) -> None:
    """Losses, parameters, optimizers, counters and random states; one warning, or none."""
    expected = plain_numbers(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [run_overlapped(made(name)), torch.rand(1), random.random()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # Python warns of forks beside threads, also in a plain loop.
    told = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert [one.startswith("nothing runs ahead: ") for one in told] == [True] * (name not in APART)


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in CURRICULA])
def test_a_loop_that_is_declared_runs_ahead_with_the_same_numbers(name: str) -> None:
    """The loader, and decode."""
    expected = plain_numbers(name)
    loop, options = declared(name)
    with swpipe.overlap(loop.loader, loop.functions, device="cpu", **options) as overlapped:
        assert overlapped.overlap.loader_ahead
        assert overlapped.overlap.ahead == (() if name in NOT_PURE else ("decode",))
        found = [run(loop, (iter(overlapped) for _ in range(loop.epochs)))]
    found += [torch.rand(1), random.random()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_there_are_forty_loops() -> None:
    """And more."""
    assert len(LOOPS) >= 40


def test_what_runs_ahead_is_told_and_what_to_say_of_the_rest() -> None:
    """Decoding does; the rest says nothing."""
    loop, options = declared("a plain loader")
    with swpipe.overlap(loop.loader, loop.functions, device="cpu", **options) as overlapped:
        assert overlapped.overlap.plan.pull_group == "loader"
        assert str(overlapped.overlap).startswith(
            "ahead: the loader, decode\n'forward', 'backward', 'step': of what they touch nothing"
        )
        assert "PipelineTask('forward', ..., pure=True)" in str(overlapped.overlap)
        assert len(overlapped) == 6


@pytest.mark.parametrize("loader", [None, 3])
def test_what_is_no_loader_is_refused(loader: Any) -> None:
    """At the call, and not as a loader of which something is not known."""
    with pytest.raises(TypeError, match=f"the loader is {loader}: give an iterable of batches"):
        swpipe.overlap(loader, [nothing()])
    with pytest.raises(TypeError, match=f"the loader is {loader}: give an iterable of batches"):
        swpipe.ahead(loader)


def test_a_step_that_trains_is_not_said_to_run_ahead() -> None:
    """Only where it uses no model that is trained."""

    def train(ctx: Any) -> None:
        """Train."""

    told = str(swpipe.overlap([1], [train, nothing()], device="cpu").overlap)
    assert "If 'train' uses its context and what nobody changes while the loop runs, no " in told
    assert "no model that is trained, and changes its context only, it may run ahead" in told


def test_an_error_names_no_plan_that_the_caller_has_not_made() -> None:
    """Tasks and a loader were given, and nothing else."""

    def train(ctx: Any) -> None:
        """Train."""

    with pytest.raises(PlanError) as refused:
        swpipe.overlap([1], [train, train], device="cpu")
    assert str(refused.value).startswith("this cannot run: 2 problems\n")
    assert "plan" not in str(refused.value)


def test_a_loader_in_this_process_is_told() -> None:
    """With the two mends, and how to say that a task is pure; not where it was asked for."""
    loop = made("a plain loader")
    reason = (
        r"nothing runs ahead: The loader \(DataLoader\).*num_workers=1.*pull_ahead=True.*'decode'"
        ".*pure=True"
    )
    with pytest.warns(RuntimeWarning, match=reason):
        overlapped = swpipe.overlap(loop.loader, loop.functions, device="cpu")
    assert overlapped.overlap.plan.depth == 1
    overlapped.close()
    swpipe.overlap(loop.loader, loop.functions, device="cpu", pull_ahead=False).close()


class Own(DataLoader[Any]):
    """As libraries have them."""


ROWS = torch.rand(8, 2)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(ROWS), r"makes its batches in this process.*num_workers=1"),
        ((row for row in ROWS), r"makes its batches in this process.*num_workers=1"),
        (Own(ROWS, num_workers=1), r"\(Own\) is of a class of which it is not known.*torch's own"),
        (
            iter(DataLoader(ROWS)),
            r"is an iterator of a DataLoader.*DataLoader itself, with workers",
        ),
        (map(abs, ROWS), r"\(map\) is of a class of which it is not known"),
        (
            DataLoader(ROWS, num_workers=1, sampler=SubsetRandomSampler([1, 2])),
            "has indices in a list or tensor, which the loop may change.*a tuple or range",
        ),
        (
            DataLoader(ROWS, num_workers=1, sampler=[1, 2]),
            r"has a sampler \(list\) that may read what the loop changes",
        ),
    ],
)
def test_why_a_loader_is_in_turn_is_told_as_it_is(loader: Any, why: str) -> None:
    """Of the task that the loader would run ahead of, nothing is asked."""
    with pytest.warns(
        RuntimeWarning, match=f"nothing runs ahead: .*{why}.*pull_ahead=True"
    ) as told:
        swpipe.overlap(loader, [nothing()], device="cpu").close()
    assert "may run ahead" not in str(told[0].message)


@pytest.mark.filterwarnings("default:the loader draws from")
def test_a_loader_that_draws_beside_the_loop_is_told_at_the_beginning() -> None:
    """Once, when it draws ahead, and of what is an error then, however rarely the loop draws."""
    rows = (torch.rand(2) for _ in range(12))
    with swpipe.overlap(rows, [nothing()], pull_ahead=True, device="cpu") as loop:
        contexts = iter(loop)
        reason = "draws from torch's default generators in the middle.*will be an error"
        with pytest.warns(RuntimeWarning, match=reason) as told:
            assert len([*islice(contexts, 7)]) == 7  # 4 are in turn
        assert len(told) == 1
        assert told[0].filename == __file__
        loop.pipe.settle()
        torch.rand(1)
        with pytest.raises(RuntimeError, match="both draw from torch's default generators"):
            next(contexts)


def test_a_loop_that_is_left_can_be_begun_again() -> None:
    """Batches that were pulled ahead are dropped, as those of a DataLoader's workers are."""
    parts = Training()
    with swpipe.overlap(batches(), parts.tasks(), pull_ahead=True, device="cpu") as overlapped:
        for ctx in overlapped:
            if ctx.iter_idx == 1:
                break
        del ctx
        assert overlapped.pipe.in_flight == 0
        before = copy.deepcopy(parts.model.state_dict())
        numbers = [ctx.iter_idx for ctx in overlapped]
        assert numbers == [2, 3, 4, 5, 6, 7]
        assert not torch.equal(parts.model.state_dict()["0.weight"], before["0.weight"])


def test_a_loop_may_be_closed_before_it_is_left() -> None:
    """A pass that is left after that has nothing to drop."""
    overlapped = swpipe.overlap(batches(), Training().tasks(), pull_ahead=True, device="cpu")
    contexts = iter(overlapped)
    next(contexts)
    overlapped.close()
    contexts.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(overlapped))


class Told(Observer):
    """Which tasks of which iteration ended, and on which thread."""

    def __init__(self) -> None:
        self.threads: dict[int, dict[str, int]] = {}

    def stop(self, ins: Any, iteration: int, exists: bool = True) -> None:
        if exists:
            self.threads.setdefault(iteration, {})[ins.task] = threading.get_ident()


def test_an_observer_was_told_of_all_tasks_of_the_iteration_that_the_body_gets() -> None:
    """By the context's number, also after a pass that was left; each on its own thread."""
    told, numbers = Told(), []
    here = {"<admit>", "forward", "backward", "step", "<retire>"}
    loop = swpipe.overlap(batches(), Training().tasks(), pull_ahead=True, device="cpu")
    with loop, loop.pipe.observe(told):
        for last in (2, 8):
            for ctx in loop:
                threads = told.threads.pop(ctx.iter_idx)
                numbers.append(ctx.iter_idx)
                assert threads.keys() == {*here, "<pull>", "decode"}
                mine = threading.get_ident()
                assert {name for name, thread in threads.items() if thread == mine} == here
                if ctx.iter_idx == last:
                    break
    assert numbers == list(range(9))


def test_a_random_task_stays_with_the_body_which_may_draw() -> None:
    """All threads share torch's default generators, which it seeds; what to do is told."""

    def noise(ctx: Any) -> None:
        ctx.x = ctx.x + torch.rand(4)

    def drawn(**options: Any) -> Any:
        functions = Training().tasks()
        functions.insert(1, PipelineTask("noise", noise, random=True, pure=True))
        torch.manual_seed(5)
        with swpipe.overlap(batches(), functions, device="cpu", seed=3, **options) as loop:
            found = [(ctx.x.sum(), torch.rand(1)) for _ in range(2) for ctx in loop]
            return loop.overlap, found

    ahead, found = drawn(pull_ahead=True)
    nothing, expected = drawn(pull_ahead=False)
    assert (ahead.ahead, nothing.ahead) == (("decode",), ())
    assert "'noise': random, and draws from torch's default generators" in str(ahead)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_pure_task_after_one_that_is_not_stays_with_it() -> None:
    """What it reads of that is not known."""
    parts = Training()
    functions = [*parts.functions(), PipelineTask("measure", lambda ctx: None, pure=True)]
    with swpipe.overlap([torch.ones(2, 4)], functions, device="cpu") as loop:
        assert loop.overlap.ahead == ()
        assert "'measure': pure, and comes after 'decode', which runs in turn" in str(loop.overlap)
        assert len(list(loop)) == 1


def test_tasks_that_are_all_pure_run_ahead_of_the_body() -> None:
    """On their thread, the last of them too."""
    threads: list[int] = []
    note = PipelineTask("note", lambda ctx: threads.append(threading.get_ident()), pure=True)
    with swpipe.overlap(range(5), [note], device="cpu") as loop:
        assert loop.overlap.ahead == ("note",)
        assert [ctx.batch for ctx in loop] == list(range(5))
    assert threading.get_ident() not in threads
    assert len(threads) == 5


@pytest.mark.parametrize("replayed", [["decode"], ["decode", "scale"], ["scale"], ["train"]])
def test_tasks_that_run_ahead_may_be_shortcut(replayed: list[str]) -> None:
    """Then no batch was given to them, or they left none."""
    decode = PipelineTask("decode", lambda ctx: setattr(ctx, "x", ctx.batch + 1), pure=True)
    scale = PipelineTask("scale", lambda ctx: setattr(ctx, "x", 2 * ctx.x), pure=True)
    train = PipelineTask("train", lambda ctx: setattr(ctx, "loss", ctx.x.sum()))
    batches = [torch.ones(2) for _ in range(9)]
    with swpipe.overlap(batches, [decode, scale, train], device="cpu") as loop:
        with loop.pipe.shortcut(*replayed):
            assert [ctx.loss.item() for ctx in loop] == [8.0] * 9
        assert [ctx.loss.item() for ctx in loop] == [8.0] * 9


def test_mistakes_are_refused() -> None:
    """Something that is no task, no tasks, what no argument can be, and one that there was."""
    with pytest.raises(TypeError, match="has no name for a task"):
        swpipe.overlap([1], [lambda ctx: None], device="cpu")
    with pytest.raises(TypeError, match="a task is a function of the context, not 3"):
        swpipe.overlap([1], [3], device="cpu")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give the tasks.* in a list"):
        swpipe.overlap([1], Training().functions()[0], device="cpu")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="there are no tasks"):
        swpipe.overlap([1], [], device="cpu")
    functions = Training().functions()
    with pytest.raises(TypeError, match="pull_ahead is 1: give True, False or None"):
        swpipe.overlap([1], functions, pull_ahead=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no argument 'iterations': overlap.. records nothing"):
        swpipe.overlap([1], functions, iterations=3)
    with pytest.raises(TypeError, match="no argument 'depth'$"):
        swpipe.overlap([1], functions, depth=3)


def test_an_empty_loader_gives_nothing() -> None:
    """As in a plain loop."""
    with swpipe.overlap([], Training().tasks(), device="cpu") as loop:
        assert list(loop) == []


class RowsContext(swpipe.TypedContext):
    """The contexts of a user."""

    x: torch.Tensor
    loss: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.batch)


def test_contexts_may_be_of_a_class_of_the_users() -> None:
    """The tasks and the body get it."""
    parts = Training()
    loop = swpipe.overlap(
        batches(), parts.tasks(), pull_ahead=True, device="cpu", context=RowsContext
    )
    with loop:
        assert loop.overlap.ahead == ("decode",)
        assert [ctx.rows for ctx in loop] == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("name", ["a list", "a curriculum"])
def test_a_second_pass_beside_the_first_is_refused(name: str) -> None:
    """It dropped what the first one had in flight; also where the plan is serial."""
    loop = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overlapped = swpipe.overlap(loop.loader, loop.functions, device="cpu")
    with overlapped:
        first = iter(overlapped)
        numbers = [next(first).iter_idx]
        with pytest.raises(RuntimeError, match="a pass over this loop has not ended"):
            next(iter(overlapped))
        with pytest.raises(RuntimeError, match="a pass over this loop has not ended"):
            overlapped.load_state_dict(overlapped.state_dict())
        assert [*numbers, *(ctx.iter_idx for ctx in first)] == [0, 1, 2, 3, 4, 5]


def test_a_device_that_is_not_there_is_told() -> None:
    """In words, before anything is pulled."""
    with pytest.raises(ValueError, match="'cuda' is not on this machine, which has no acc"):
        swpipe.overlap([1], [nothing()], device="cuda")
    with pytest.raises(ValueError, match="'gpu' is unknown to torch: give a name such as"):
        swpipe.overlap([1], [nothing()], device="gpu")


def test_a_cpu_needs_no_copy() -> None:
    """The batch is the loader's."""
    batches = [torch.ones(2)] * 3
    with swpipe.overlap(batches, [nothing()], device="cpu") as overlapped:
        assert overlapped.overlap.ahead == ()
        assert all(ctx.batch is batches[0] for ctx in overlapped)


def nothing() -> PipelineTask:
    """A task that does nothing."""
    return PipelineTask("nothing", lambda ctx: None)

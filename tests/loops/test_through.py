"""Functions before, on and after the loop's thread: results are those of the plain loop."""

from __future__ import annotations

import json
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import swpipe
from swpipe import on_caller
from swpipe.errors import PlanError
from swpipe.loops import StopRequest
from tests.loops.ordinary_loops import Rows, batches
from tests.support.budget import FACTOR, seeds
from tests.support.scripts import DEADLINE_S, Script, Scripts
from tests.support.sequencer import await_event, swpipe_threads

THROUGH: Any = swpipe.through


def through(loader: Iterable[Any], *functions: Any, **options: Any) -> Any:
    """Run ``swpipe.through`` on the CPU."""
    return swpipe.through(loader, *functions, device="cpu", **options)


def add(batch: int) -> int:
    return batch + 1


# ------------------------------------------------------------------ the loops that people write

Lines = Callable[[str], None]
Way = Callable[..., Iterable[Any]]


def plainly(loader: Iterable[Any], *functions: Any, **_: Any) -> Iterator[Any]:
    """Yield the results of a plain loop with these functions."""
    for batch in loader:
        value = batch
        for function in functions:
            value = getattr(function, "function", function)(value)
        yield value


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def evaluation_with_a_file(way: Way, folder: Path) -> Any:
    """Decode, run a model, and write one line per row to a file."""
    net = model().eval()
    with (folder / "predictions.txt").open("w") as file, torch.no_grad():

        def write(labels: list[int]) -> int:
            file.writelines(f"{label}\n" for label in labels)
            return len(labels)

        labels = lambda scores: scores.argmax(1).tolist()  # noqa: E731
        return sum(way(batches(), torch.sin, on_caller(net), labels, write))


def metrics(way: Way, folder: Path) -> Any:
    """Update a confusion matrix and a mean from batch to batch."""
    net, seen = model().eval(), torch.zeros(3, dtype=torch.long)
    total = torch.zeros(())

    def count(scores: Tensor) -> Tensor:
        seen.index_add_(0, scores.argmax(1), torch.ones(len(scores), dtype=torch.long))
        return scores

    def mean(scores: Tensor) -> Tensor:
        total.add_(scores.mean())
        return total.clone()

    with torch.inference_mode():
        return [*way(batches(), on_caller(net), count, mean)], seen, total


def export_of_embeddings(way: Way, folder: Path) -> Any:
    """Embed ahead, with frozen weights, and write a file for each batch."""
    table, net = nn.Embedding(50, 4), model().eval()
    ids = [torch.arange(k, k + 5) for k in range(12)]

    def save(out: tuple[int, Tensor]) -> str:
        torch.save(out[1], folder / f"{out[0]}.pt")
        return f"{out[0]}.pt"

    with torch.no_grad():
        loader = [*enumerate(ids)]
        embed = lambda batch: (batch[0], table(batch[1]))  # noqa: E731
        run = on_caller(lambda batch: (batch[0], net(batch[1])))
        return [*way(loader, embed, run, save)]


def generation(way: Way, folder: Path) -> Any:
    """Sample from a model, and decode on three threads."""
    net = model().eval()

    def sample(x: Tensor) -> Tensor:
        return torch.multinomial(net(x).softmax(1), 2, replacement=True)

    def text(tokens: Tensor) -> str:
        return " ".join(map(str, tokens.flatten().tolist()))

    with torch.no_grad():
        return [*way(batches(), on_caller(sample), text, workers={text: 3}, draws=False)]


def training_with_a_log(way: Way, folder: Path) -> Any:
    """Train, and write copies of loss and gradient norm in a later function."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), net[0].weight.detach()

    log: list[str] = []

    def write(values: tuple[Tensor, Tensor]) -> int:
        log.append(json.dumps([float(values[0]), float(values[1].norm())]))
        (folder / "log.jsonl").write_text("\n".join(log))
        return len(log)

    rows = batches(batch_size=3, drop_last=True)
    found = [*way(rows, torch.cos, on_caller(step, to_host=True), write)]
    return found, net.state_dict()


def training_with_checkpoints(way: Way, folder: Path) -> Any:
    """Train, and save copies of the weights in a later function, in every third step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    steps = iter(range(100))

    def step(x: Tensor) -> tuple[int, Any]:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        number = next(steps)
        return number, net.state_dict() if number % 3 == 0 else None

    def save(state: tuple[int, Any]) -> int:
        if state[1] is not None:
            torch.save(state[1], folder / f"step{state[0]}.pt")
        return state[0]

    return [*way(batches(batch_size=3, drop_last=True), on_caller(step, to_host=True), save)]


LOOPS = [
    evaluation_with_a_file,
    metrics,
    export_of_embeddings,
    generation,
    training_with_a_log,
    training_with_checkpoints,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_results_and_files_are_those_of_the_plain_loop(
    loop: Callable[[Way, Path], Any], tmp_path: Path
) -> None:
    """Six loops that evaluate, export, generate and train are equal bit for bit."""
    found = []
    for name, way in (("plain", plainly), ("through", through)):
        torch.manual_seed(11)
        folder = tmp_path / name
        folder.mkdir()
        result = loop(way, folder)
        files = {path.name: contents(path) for path in sorted(folder.iterdir())}
        found.append((result, files, torch.get_rng_state()))
    plain, ours = map(pytree.tree_flatten, found)
    assert ours[1] == plain[1]
    for value, expected in zip(ours[0], plain[0], strict=True):
        assert type(value) is type(expected)
        assert torch.equal(value, expected) if isinstance(value, Tensor) else value == expected


def contents(path: Path) -> Any:
    """Return what a file has; of torch's files only the tensors, as they store their name."""
    return torch.load(path) if path.suffix == ".pt" else path.read_text()


# ---------------------------------------------------------------------- what runs at one time


def test_functions_behind_run_while_the_caller_works_on_later_batches() -> None:
    """Decode and write wait for the next two calls of the model, which come before them."""
    begun = [threading.Event() for _ in range(6)]

    def run(batch: int) -> int:
        begun[batch].set()
        return batch

    def decode(batch: int) -> int:
        await_event(begun[min(batch + 1, 5)], "the next call")
        return batch

    def write(batch: int) -> int:
        await_event(begun[min(batch + 2, 5)], "the call after it")
        return batch

    assert list(through(range(6), on_caller(run), decode, write, behind=2)) == [*range(6)]


def test_no_more_results_are_behind_than_was_said() -> None:
    """The caller's function waits for them."""
    done: list[int] = []

    def run(batch: int) -> int:
        assert batch - len(done) <= 2
        return batch

    loop = through(range(9), on_caller(run), done.append, behind=1)
    assert list(loop) == [None] * 9


def test_a_function_behind_has_as_many_threads_as_was_said() -> None:
    """Three batches are decoded at once, and the results come in order."""
    together = threading.Barrier(3)

    def decode(batch: int) -> int:
        together.wait(60)
        return -batch

    loop = through(range(6), add, on_caller(add), decode, workers={decode: 3})
    assert str(loop.overlap) == "ahead: the loader, add\nin turn: add 2\nbehind: decode"
    assert list(loop) == [-2, -3, -4, -5, -6, -7]


def test_all_run_ahead_if_none_is_on_the_caller() -> None:
    """This is as with ``ahead``."""
    assert list(through(range(3), add, str)) == ["1", "2", "3"]
    assert list(through(range(3))) == [0, 1, 2]
    assert list(through([], on_caller(add), str)) == []


# ------------------------------------------------------------------------------------ endings


class Planned(Exception):
    """A failure that a test asked for."""


class Interrupted(BaseException):
    """An interrupt like Ctrl-C."""


class Program:
    """A loop that fails or is left at one place, with what it has done.

    Attributes:
        where: The part that fails, or the way in which the loop is left.
        at: The batch at which this happens.
        calls: The batches that the function on the caller's thread has had.
        written: The results that the last function has written.
        results: The results that the loop's body has got.
    """

    def __init__(self, where: str, at: int) -> None:
        self.where, self.at = where, at
        self.calls: list[int] = []
        self.written: list[int] = []
        self.results: list[int] = []

    def check(self, where: str, batch: int) -> None:
        if where == self.where and batch == self.at:
            raise Interrupted if "interrupt" in where else Planned(where)

    def loader(self) -> Iterator[int]:
        for batch in range(12):
            self.check("loader", batch)
            yield batch

    def decode(self, batch: int) -> int:
        self.check("decode", batch)
        return batch

    def step(self, batch: int) -> int:
        self.check("step", batch)
        self.check("step, by an interrupt", batch)
        self.calls.append(batch)
        return batch

    def label(self, batch: int) -> int:
        self.check("label", batch)
        return batch

    def write(self, batch: int) -> int:
        self.check("write", batch)
        self.written.append(batch)
        return batch

    def run(self, loop: Iterable[int]) -> str:
        """Run one pass; return how it ended."""
        try:
            for result in loop:
                self.results.append(result)
                self.check("body", result)
                self.check("body, by an interrupt", result)
                if (self.where, self.at) == ("break", result):
                    return "break"
        except (Planned, Interrupted) as error:
            return repr(error)
        return "end"


PLACES = (
    *("loader", "decode", "step", "label", "write", "body", "break", "end"),
    *("step, by an interrupt", "body, by an interrupt"),
)


@pytest.mark.examples
def test_a_loop_that_ends_early_has_the_results_of_the_plain_one_and_loses_nothing() -> None:
    """It ends by an error anywhere, a break or an interrupt; the iterator is not used again."""
    for seed in seeds("endings", 60):
        draws = random.Random(seed)
        where, at = draws.choice(PLACES), draws.randrange(12)
        options = {"ahead": draws.choice((2, 4)), "behind": draws.choice((None, 1, 3))}
        plain, ours = Program(where, at), Program(where, at)
        functions = (ours.decode, on_caller(ours.step), ours.label, ours.write)
        iterator = ours.loader()
        oracle = plain.loader()
        with through(iterator, *functions, draws=True, **options) as loop:
            ended = ours.run(loop)
            wanted = plain.run(plainly(oracle, plain.decode, plain.step, plain.label, plain.write))
            told = (seed, where, at, options)
            assert ended == wanted, told
            if where == "step, by an interrupt":  # it comes at once
                assert ours.results == plain.results[: len(ours.results)], told
            else:
                assert ours.results == plain.results, told
            assert ours.written[: len(plain.written)] == plain.written, told
            if where in ("label", "write"):
                assert ours.written == plain.written, told
            else:
                assert ours.written == ours.calls, told
            if where in ("loader", "end"):
                assert ours.run(loop) == "end", told
            else:
                with pytest.raises(RuntimeError, match="results .* behind .* were dropped"):
                    ours.run(loop)
            assert ours.written == sorted({*ours.written}), told
        assert not swpipe_threads(), told


@pytest.mark.examples
def test_an_interrupt_at_a_random_moment_loses_nothing(scripts: Scripts) -> None:
    """All results are written once."""
    first, *more = seeds("endings", 30)
    args = (f"{first}", f"{1 + len(more)}")  # see ``through_signals``
    script = Script(module="tests.loops.through_signals", args=args)
    done = scripts.run(script, deadline_s=DEADLINE_S * FACTOR)
    assert (done.returncode, done.stdout) == (0, f"{args[1]} trials\n"), done.stderr


def test_a_function_that_is_running_is_awaited_when_the_loop_is_left() -> None:
    """Results whose functions have not begun are processed then."""
    leaving, running, written = threading.Event(), threading.Event(), list[int]()

    def write(batch: int) -> int:
        if batch == 2:
            running.set()
            await_event(leaving, "the end of the body")
        written.append(batch)
        return batch

    loop = through(range(9), on_caller(add), write, behind=2, ahead=1)
    for result in loop:
        if result == 1:
            await_event(running, "the next write")
            threading.Timer(0.05, leaving.set).start()
            break
    assert written[:2] == [1, 2]
    assert len(written) == len({*written}) >= 3


def test_an_error_after_the_loop_was_left_is_told_and_raised_later() -> None:
    """A warning reports it, and the next pass or ``close`` raises it."""
    left = threading.Event()

    def write(batch: int) -> int:
        if batch > 1:
            await_event(left, "the break")
            raise Planned
        return batch

    for ends in ("close", "next pass"):
        left.clear()
        loop = through(range(9), on_caller(add), write)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loop:
                left.set()
                break
        assert ["failed after the loop was left" in str(one.message) for one in caught] == [True]
        with pytest.raises(Planned):
            loop.close() if ends == "close" else iter(loop)


def test_a_stop_request_ends_it_with_all_that_was_handed_over() -> None:
    """SIGTERM ends it at the end of the step."""
    written: list[int] = []
    loop = through(range(99), on_caller(add), written.append)
    with StopRequest(["SIGTERM"]) as stop:
        for number, result in enumerate(stop.watch(loop)):
            if number == 3:
                signal.raise_signal(signal.SIGTERM)
            assert result is None
    assert stop.requested
    assert written == [*range(1, len(written) + 1)]
    assert 4 <= len(written) <= 6  # two are behind


def test_a_stop_iteration_of_a_function_is_an_error() -> None:
    """It is not the end of the data."""

    def stop(batch: int) -> int:
        return next(iter(()))

    for functions in ((on_caller(stop),), (on_caller(add), stop)):
        with pytest.raises(RuntimeError, match="'stop' raised StopIteration"):
            list(through(range(3), *functions))


def test_what_an_error_behind_has_kept_from_running_is_noted() -> None:
    """The error names the iterations that were handed over, and not passed on."""
    begun = threading.Event()

    def run(batch: int) -> int:
        if batch == 1:
            begun.set()
        return batch

    def write(batch: int) -> None:
        await_event(begun, "the next call")
        raise Planned

    with pytest.raises(Planned) as caught:
        list(through(range(2), on_caller(run), write))
    notes = " ".join(caught.value.__notes__)
    assert "raised by 'write', iteration 0" in notes
    assert "did not run on iterations [1]" in notes


# --------------------------------------------------------------------------------- what is refused


def test_weights_that_nobody_trains_may_be_read_ahead() -> None:
    """This needs no_grad; with gradients, training may change the weights, and it is refused."""
    net = nn.Linear(4, 4)
    plain = [net(batch) for batch in batches()]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = [*through([*batches()], net, on_caller(torch.sin), torch.neg)]
        torch.testing.assert_close(found, [-one.sin().detach() for one in plain], rtol=0, atol=0)
    with pytest.raises(PlanError, match="requires grad"):
        list(through([*batches()], net, on_caller(torch.sin)))


def test_weights_that_are_changed_without_gradients_are_an_error() -> None:
    """The change itself is detected."""
    net = nn.Linear(4, 4)

    def change(x: Tensor) -> Tensor:
        net.weight.mul_(0.5)
        return x

    with torch.no_grad(), pytest.raises(PlanError, match="something has changed"):
        list(through([*batches(batch_size=1)], net, on_caller(change)))


def test_a_value_that_is_changed_after_it_was_handed_over_is_an_error() -> None:
    """The next step or a later function changes it; a copy is right."""
    weights = torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        weights.add_(1)
        return weights

    with pytest.raises(PlanError, match="'step' handed over a value of iteration 0 that was chang"):
        list(through([*batches()], on_caller(step), float_of))
    with pytest.raises(PlanError, match="function behind"):
        list(through([*batches()], on_caller(torch.clone), Tensor.zero_))
    weights.zero_()
    found = list(through([*batches()], on_caller(step, to_host=True), float_of))
    assert found == [4.0 * k for k in range(1, 7)]


def float_of(x: Tensor) -> float:
    return float(x.sum())


def test_a_function_behind_that_draws_is_an_error() -> None:
    """Its numbers would depend on earlier draws."""
    with pytest.raises(PlanError, match="'rand_like' draws from torch's default generators"):
        list(through([*batches()], on_caller(torch.clone), torch.rand_like))
    list(through([*batches()], on_caller(torch.clone), torch.rand_like, check_effects=False))


def test_a_state_is_not_saved_while_results_are_behind() -> None:
    """The state would lead to batches for which the caller's function has already run."""
    loop = through(range(9), on_caller(add), str)
    for _ in loop:
        with pytest.raises(RuntimeError, match="Save between two passes"):
            loop.state_dict()
        break
    assert loop.state_dict(rest=False)["batches"] == 0
    assert [*loop] == [str(k + 1) for k in range(9)]
    other = through(range(9), on_caller(add), str)
    other.load_state_dict(loop.state_dict())
    assert len([*other]) == 9


def test_without_functions_behind_it_resumes_in_mid_pass() -> None:
    """This is as with ``ahead``."""
    loop, found = through(batches(), torch.sin, on_caller(torch.neg)), []
    for result in loop:
        found.append(result)
        if len(found) == 2:
            state = loop.state_dict()
            break
    other = through(batches(), torch.sin, on_caller(torch.neg))
    other.load_state_dict(state)
    torch.testing.assert_close([*found, *other], [-torch.sin(x) for x in batches()], rtol=0, atol=0)


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: THROUGH([1], 3), TypeError, "and 3 is neither"),
    (lambda: swpipe.on_caller(3), TypeError, "takes a function, and 3 cannot be called"),  # type: ignore[arg-type]
    (lambda: THROUGH([1], on_caller(abs), on_caller(add)), ValueError, "abs.*add.*one such place"),
    (lambda: THROUGH([1], on_caller(abs), abs, behind=-1), ValueError, "behind is -1: give 1 or m"),
    (lambda: THROUGH([1], on_caller(abs), behind=1), ValueError, "no function is behind"),
    (lambda: THROUGH([1], abs, ahead=-1), ValueError, "ahead is -1: give 2 or more with functions"),
    (lambda: THROUGH([1], on_caller(abs), ahead=0), ValueError, "ahead is 0: give 1 or more$"),
    (lambda: THROUGH([1], on_caller(abs), ahead=True), ValueError, "ahead is True: give 1"),
    (lambda: THROUGH([1], abs, workers=0), ValueError, "workers is 0: give the number of threads"),
    (lambda: THROUGH([1], on_caller(abs), workers=2), ValueError, "workers is 2"),
    (lambda: THROUGH([1], on_caller(abs), workers={abs: 2}), ValueError, "not on_caller"),
    (lambda: THROUGH(3, on_caller(abs)), TypeError, "the loader is 3: give an iterable"),
    (lambda: THROUGH([1], on_caller(abs), behnd=2), TypeError, "unexpected .* 'behnd'"),
    (lambda: THROUGH(THROUGH([1], abs), abs), TypeError, "the loader is a loop itself"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes_are_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    """They are refused at the call."""
    with pytest.raises(error, match=f"(?s){words}"):
        call()


def test_a_loader_with_workers_goes_through_twice() -> None:
    """It makes two passes with all results."""
    loader: DataLoader[Tensor] = DataLoader(Rows(), 4, num_workers=1)
    loop = through(loader, torch.sin, on_caller(torch.neg), float_of)
    expected = [float_of(-torch.sin(batch)) for batch in batches()]
    assert [[*loop], [*loop]] == [expected, expected]

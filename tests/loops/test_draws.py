"""The users of a loop's random generators: declared, seen, reported, and refused."""

from __future__ import annotations

import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import swpipe
from swpipe.core.loaders import draws_nothing
from swpipe.device import resolve
from swpipe.loops import pull_times
from swpipe.loops.draws import LoaderDraws
from swpipe.loops.pass_generators import PassGenerators, changed
from swpipe.pipeline import settle
from tests.loops.ordinary_loops import Rows, batches
from tests.loops.random_loops import DRAWS, FOR_A_MOMENT
from tests.support.sequencer import PATIENCE_S

IN_TURN = "draws from .*made in turn with the body"


def seed(number: int = 3) -> None:
    """Seed all default generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def pulls(count: int, draw: Callable[[int], float]) -> Iterator[float]:
    """Yield draws in this process."""
    for number in range(count):
        yield number + draw(number)


def nothing(number: int) -> float:
    return 0.0


def thread_of_pulls(count: int) -> Iterator[int]:
    """Yield the thread that makes each batch."""
    for _ in range(count):
        yield threading.get_ident()


def draw_nothing(ctx: Any) -> None:
    """Do nothing."""


class Noisy(Rows):
    """A dataset that draws on the thread that reads it."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(4)


def both_draw(*loops: Any) -> list[float]:
    """Run loops over loaders, with bodies that draw."""
    return [float(torch.rand(1)) + random.random() for loop in loops for _ in loop]


# ------------------------------------------------------------------------------------- turns


def test_pulls_in_turn_are_made_on_the_callers_thread() -> None:
    """If nothing is declared and the body draws, they have the plain loop's speed."""
    with pytest.warns(RuntimeWarning, match=IN_TURN):
        threads = [(thread, random.random())[0] for thread in swpipe.ahead(thread_of_pulls(20))]
    assert {*threads} == {threading.get_ident()}


def test_a_loader_that_draws_beside_a_quiet_body_takes_turns_without_a_word() -> None:
    """A later draw of the body would leave no trace; ``draws=True`` says that there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = threading.get_ident()
        found = [*swpipe.ahead(pulls(12, lambda number: random.random()), device="cpu")]
        assert len(found) == 12

        def loader() -> Iterator[bool]:
            for _ in range(12):
                random.random()
                yield threading.get_ident() == mine

        assert all(swpipe.ahead(loader(), device="cpu"))
        assert not any(swpipe.ahead(loader(), draws=True, device="cpu"))


def test_a_loader_that_draws_nothing_is_ahead_of_a_quiet_body_from_the_fifth_batch_on() -> None:
    """Four bodies run alone, to see whether they draw; no later pull waits."""
    mine = threading.get_ident()
    assert [one == mine for one in swpipe.ahead(thread_of_pulls(20))] == [True] * 5 + [False] * 15


@pytest.mark.parametrize("draws", [False, True])
def test_what_is_said_lets_the_loader_be_ahead(draws: bool) -> None:
    """The body and a later pull overlap."""
    meet = threading.Barrier(2, timeout=PATIENCE_S)

    def loader() -> Iterator[int]:
        for number in range(12):
            if draws:
                random.random()
            if number >= 6:
                meet.wait()
            yield number

    for number in swpipe.ahead(loader(), draws=draws, device="cpu"):
        if not draws:
            random.random()
        if 5 <= number < 11:
            meet.wait()


def test_the_warning_says_what_to_type_and_that_is_ahead() -> None:
    """The line in the message gives the overlap if it is pasted."""
    rows = [thread_of_pulls(12), thread_of_pulls(12)]
    loader = rows[0]
    with pytest.warns(RuntimeWarning, match=IN_TURN) as told:
        assert len([random.random() for _ in swpipe.ahead(loader)]) == 12
    line = next(one.strip() for one in str(told[0].message).splitlines() if "(loader" in one)
    assert told[0].filename == __file__
    names = {"ahead": swpipe.ahead, "loader": rows[1]}
    threads = [(thread, random.random())[0] for thread in eval(line, names)]
    assert threads[5:] != threads[:1] * 7


def test_it_is_told_once_of_a_loader_and_not_of_a_quiet_body() -> None:
    """This holds for any number of loops."""
    loader = batches(Noisy())
    with pytest.warns(RuntimeWarning, match=IN_TURN) as told:
        assert len(both_draw(*(swpipe.ahead(loader, device="cpu") for _ in range(3)))) == 18
    assert len(told) == 1
    assert "num_workers=1" in str(told[0].message)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("when", ["always", "now and then"])
def test_a_loader_and_a_body_that_draw_alike_take_turns(name: str, when: str) -> None:
    """They draw only temporarily, too, and have the numbers of the plain loop every time."""
    draw = DRAWS[name]

    def run(over: Callable[[Any], Any]) -> list[Any]:
        seed()
        often = when == "always"
        loader = pulls(24, lambda number: draw() if often or number % 7 == 3 else 0.0)
        seen = [(batch, draw()) for batch in over(loader)]
        return [seen, float(torch.rand(1)), random.random(), float(np.random.rand())]

    expected = run(iter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert run(swpipe.ahead) == expected


def test_a_body_that_begins_to_draw_beside_a_loader_that_does_not_takes_turns() -> None:
    """They take turns from then on."""
    mine = threading.get_ident()
    loop = swpipe.ahead(thread_of_pulls(30), device="cpu")

    def body(number: int, thread: int) -> bool:
        settle(loop.pipe)  # no pull is under way
        if number == 9:
            random.random()
        return thread == mine

    with pytest.warns(RuntimeWarning, match=IN_TURN):
        seen = [body(number, thread) for number, thread in enumerate(loop)]
    assert seen[5:9] == [False] * 4
    assert seen[-10:] == [True] * 10


def test_a_body_that_begins_to_draw_late_beside_a_loader_that_has_drawn_is_an_error() -> None:
    """It names the first batch whose iteration may differ."""
    loader = pulls(30, lambda number: random.random() if number > 5 else 0.0)
    loop = swpipe.ahead(loader, device="cpu")
    contexts = iter(loop)
    assert len([*islice(contexts, 6)]) == 6
    settle(loop.pipe)
    random.random()
    with pytest.raises(RuntimeError, match="both draw from Python's.*batch [56] of the pass.*dra"):
        both_draw(contexts)


def test_an_iterator_that_has_drawn_ahead_of_a_break_is_told() -> None:
    """Code after the loop draws other numbers than in a plain loop."""
    loop = swpipe.ahead(pulls(30, lambda number: random.random() if number > 5 else 0.0))

    def leave_after_six() -> None:
        for number, _ in enumerate(loop):
            settle(loop.pipe)
            if number == 5:
                break

    with pytest.warns(RuntimeWarning, match="the loader has drawn ahead from Python's default"):
        leave_after_six()


def test_draws_true_is_an_error_where_the_body_draws() -> None:
    """The error comes at the first hand-over that shows it."""
    loop = swpipe.ahead(pulls(30, lambda number: random.random()), draws=True, device="cpu")
    with pytest.raises(RuntimeError, match="both draw from Python's.*draws=True says that the loa"):
        assert [random.random() for _ in loop]


# ------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("name", DRAWS)
def test_draws_false_is_checked(name: str) -> None:
    """A draw without net change counts, too; the error names the generator, and where."""
    draw = DRAWS[name]
    with pytest.raises(RuntimeError, match="draws=False says.*pull 2 .*default generator") as error:
        for _ in swpipe.ahead(pulls(9, lambda number: draw()), draws=False, device="cpu"):
            pass
    if name in FOR_A_MOMENT:
        assert "random_loops.py" in str(error.value)


def test_draws_false_is_checked_later_too() -> None:
    """Pulls are checked at growing distances."""
    with pytest.raises(RuntimeError, match="pull 16 of the pass has drawn from numpy's"):
        for _ in swpipe.ahead(
            pulls(30, lambda number: np.random.rand() if number > 10 else 0.0),
            draws=False,
            device="cpu",
        ):
            pass


class Drawn(Sampler[int]):
    """A sampler that draws each index from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(22):
            yield random.randrange(22)

    def __len__(self) -> int:
        return 22


def test_draws_false_names_the_sampler_that_draws() -> None:
    """It names a sampler of torch by its class, at the call; another by its method, in the pull."""
    explicit = RandomSampler(Rows(), replacement=True, generator=torch.default_generator)
    with pytest.raises(ValueError, match="its RandomSampler draws from torch's for each batch"):
        swpipe.ahead(batches(sampler=explicit), draws=False, device="cpu")
    with pytest.raises(RuntimeError, match=r"in Drawn.__iter__ \(.*test_draws.py"):
        for _ in swpipe.ahead(batches(sampler=Drawn()), draws=False, device="cpu"):
            pass


@pytest.mark.parametrize("draws", [0, 1, "no", [False]])
def test_draws_is_true_false_or_none(draws: Any) -> None:
    """This holds for ahead and for overlap."""
    for call in (swpipe.ahead, swpipe.overlap):
        given: tuple[Any, ...] = ([1],) if call is swpipe.ahead else ([1], [draw_nothing])
        with pytest.raises(TypeError, match="draws is .*: give True, False or None"):
            call(*given, draws=draws)  # type: ignore[operator]


class Own(Dataset[Tensor]):
    """A dataset of a user's own."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


ROWS = torch.rand(8, 2)


@pytest.mark.parametrize(
    ("loader", "known"),
    [
        ([1], True),
        ((1,), True),
        (range(3), True),
        (DataLoader(TensorDataset(ROWS), shuffle=True), True),
        (DataLoader([1, 2, 3], shuffle=True), True),  # type: ignore[arg-type]
        (DataLoader(Own(), num_workers=1), True),
        (DataLoader(Own()), False),
        (DataLoader(TensorDataset(ROWS), collate_fn=lambda rows: rows), False),
        (DataLoader(TensorDataset(ROWS), sampler=Drawn()), False),
        (
            DataLoader(
                TensorDataset(ROWS),
                sampler=RandomSampler(
                    range(8), replacement=True, generator=torch.default_generator
                ),
            ),
            False,
        ),
        ((one for one in range(3)), False),
    ],
)
def test_a_loader_is_known_by_its_type(loader: Any, known: bool) -> None:
    """Torch's loaders of existing data draw nothing after the first batch of a pass."""
    assert draws_nothing(loader) is known


def test_a_known_loader_is_ahead_of_a_body_that_draws() -> None:
    """Its shuffle comes first, as in a plain loop."""

    def run(over: Callable[[Any], Any]) -> list[Any]:
        seed()
        loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=2, shuffle=True)
        return [(x.tolist(), torch.rand(1).item()) for _ in range(3) for (x,) in over(loader)]

    expected = run(lambda loader: loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(swpipe.ahead) == expected


# ---------------------------------------------------------------------------------- the states


@pytest.mark.parametrize("name", [one for one in DRAWS if one not in FOR_A_MOMENT])
def test_a_look_at_the_generators_shows_each_draw(name: str) -> None:
    """A number in reserve counts, too: every second normal number is one."""
    generators = PassGenerators([1], resolve("cpu"))
    seed()
    before = generators.read(generators.defaults)
    for _ in range(5):
        DRAWS[name]()
        now = generators.read(generators.defaults)
        assert len(changed(before, now)) == 1
        before = now
    assert not changed(before, generators.read(generators.defaults))


def test_a_state_that_changes_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread changes it, and restores it."""
    from swpipe.loops import pass_generators

    state_of = pass_generators._state_of

    def drawn(generator: Any) -> Any:
        random.random()
        return state_of(generator)

    generators, before = PassGenerators([1], resolve("cpu")), random.getstate()
    monkeypatch.setattr(pass_generators, "_state_of", drawn)
    assert generators.read(generators.defaults)["python"] != before
    monkeypatch.undo()
    random.setstate(before)
    assert generators.read(generators.defaults)["python"] == before


def test_a_look_does_not_depend_on_how_an_interpreter_keeps_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the state is not found in memory, it is read by a call."""
    from swpipe.loops import pass_generators

    monkeypatch.setattr(pass_generators, "_OFFSET", 0)
    test_a_look_at_the_generators_shows_each_draw("random")


# ------------------------------------------------------------------------------------ resuming


@pytest.mark.filterwarnings("ignore:the loop, a task or its body, draws")
@pytest.mark.parametrize("name", ["torch.rand", "random", "numpy"])
@pytest.mark.parametrize("stop", [2, 5, 9, 13, 17])
def test_a_loop_that_takes_turns_is_resumed_with_the_same_numbers(name: str, stop: int) -> None:
    """The loader and the body share a generator."""
    draw = DRAWS[name]

    class Drawing(Dataset[float]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> float:
            if not 0 <= index < 12:
                raise IndexError(index)
            return index + draw()

    def made() -> Any:
        return DataLoader(Drawing(), 1)

    seed(1)
    whole = [(batch.item(), draw()) for _ in range(2) for batch in made()]
    seed(1)
    found: list[Any] = []
    state: Any = None
    loop = swpipe.ahead(made(), device="cpu")
    while state is None:
        for batch in loop:
            found.append((batch.item(), draw()))
            if len(found) == stop:
                state = loop.state_dict()
                break
    assert found == whole[:stop]
    seed(2)
    loop = swpipe.ahead(made(), device="cpu")
    loop.load_state_dict(state)
    while len(found) < len(whole):
        found += [(batch.item(), draw()) for batch in loop]
    assert found == whole


def test_a_state_says_that_the_loop_takes_turns() -> None:
    """A resumed loop takes turns from its first batch on, before any draw."""
    loop = swpipe.ahead([*range(4)], device="cpu")
    state = loop.state_dict()
    assert state["in_turn"] is False
    rows = DataLoader(Own(), batch_size=1)
    loop = swpipe.ahead(rows, device="cpu")
    with pytest.warns(RuntimeWarning, match=IN_TURN):
        states = [(random.random(), loop.state_dict())[1] for _ in loop]
    assert states[-2]["in_turn"] is True
    again = swpipe.ahead(rows, device="cpu")
    again.load_state_dict(states[1])
    assert again._pulled.draws.in_turn


def test_a_window_in_which_either_may_have_drawn_is_an_error_when_both_have() -> None:
    """The loader has drawn while the body has not; the body draws later, in a turn."""
    generators = PassGenerators([1], resolve("cpu"))
    draws = LoaderDraws(generators)
    draws.begin()
    draws.asked(0, pulling=False, ahead=False)
    draws.before_pull(7, 5, alone=False)
    random.random()
    draws.after_pull(7, {}, 5, alone=False)
    assert draws.in_turn
    draws.asked(8, pulling=False, ahead=False)
    random.random()
    draws.asked(9, pulling=False, ahead=False)  # the body has; of the loader it is not known
    before = draws.before_pull(10, 9, alone=True)
    random.random()
    draws.after_pull(10, before, 9, alone=True)
    with pytest.raises(RuntimeError, match="both draw from Python's.*batch 5 of the pass"):
        draws.asked(10, pulling=False, ahead=False)


def test_torchs_own_lines_do_not_end_the_watch() -> None:
    """A seed formats a stack, in thousands of lines."""

    def draw() -> float:
        for _ in range(3):
            torch.nn.init.calculate_gain("relu")
        return DRAWS["FakeData"]()

    def loader() -> Iterator[float]:
        for _ in range(9):
            for _ in range(60):
                torch.jit.annotate(int, 3)
                torch.random.initial_seed()
                str(torch.ones(40))
            yield draw()

    with pytest.raises(RuntimeError, match="draws=False says"):
        list(swpipe.ahead(loader(), draws=False, device="cpu"))


def test_a_pull_in_turn_does_not_begin_beside_one_that_is_ahead() -> None:
    """The caller comes to pull 16, in turn, while the pipeline's thread still makes it."""
    inside: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            return map(self.pull, range(40))

        def pull(self, number: int) -> int:
            inside.append(number)
            assert inside == [number]
            inside.pop()
            return number

    for _ in range(20):
        loop = swpipe.ahead(Loader(), prefetch=1, draws=False, device="cpu")
        assert list(loop) == [*range(40)]


@pytest.mark.parametrize(
    ("draws", "told"), [(None, r"12 of 13 batches.*draws=True if the loop"), (True, "")]
)
def test_after_the_first_pass_it_is_said_how_many_pulls_waited(
    draws: bool | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says it once, also if the body draws nothing."""

    class Drawing:
        def __iter__(self) -> Iterator[float]:
            return pulls(12, lambda number: random.random())

    loop = swpipe.ahead(Drawing(), draws=draws, device="cpu")
    for _ in range(2):
        assert len(list(loop)) == 12
    lines = [one.getMessage() for one in caplog.records if "in turn" in one.getMessage()]
    assert len(lines) == bool(told)
    assert all(re.search(told, line) for line in lines)


@pytest.mark.parametrize("functions", [(), (abs,)])
def test_pulls_that_take_less_than_a_hand_over_are_serial_for_as_long_as_they_do(
    functions: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their average counts, from some number of pulls on; loops with functions run ahead."""
    monkeypatch.setattr(pull_times, "_MANY", 8)
    monkeypatch.setattr(pull_times, "_QUICK_S", 3600.0)
    mine = threading.get_ident()

    def body(number: int, thread: int) -> bool:
        if number == 12:
            monkeypatch.setattr(pull_times, "_QUICK_S", 0.0)  # pull 13 is one that takes long
        return thread == mine

    loop = swpipe.ahead(thread_of_pulls(20), *functions, draws=True, device="cpu")
    serial = [body(number, thread) for number, thread in enumerate(loop, 1)]
    quick = not functions
    assert serial == [False] * 8 + [quick] * 5 + [False] * 7


@pytest.mark.parametrize("start_s", [0.0, 3600.0])
def test_a_pass_that_takes_less_than_the_start_of_threads_is_serial(
    start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is from the second pass on, for as many batches; loops with functions run ahead."""
    monkeypatch.setattr(pull_times, "_START_S", start_s)
    mine = threading.get_ident()
    size = 12

    class Loader:
        def __iter__(self) -> Iterator[int]:
            return thread_of_pulls(size)

    loop = swpipe.ahead(Loader(), draws=True, device="cpu")
    assert [thread == mine for thread in loop] == [False] * 12
    size = 15
    assert [thread == mine for thread in loop] == [start_s > 0] * 13 + [False] * 2
    loop = swpipe.ahead(Loader(), lambda thread: thread, draws=True, device="cpu")
    for _ in range(2):
        assert [thread == mine for thread in loop] == [False] * 15

"""Two ranks agree on the end of their data, and on its errors, before one of them drains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from swpipe._distributed.batches_left import batches_left
from swpipe._distributed.even_data import EvenData
from tests._distributed.endings import Ending, Training, faults, pipeline_of, run
from tests.support.ranks import RankDied, Ranks

EVEN = (True,) * 40
LATE = (*(True,) * 20, False, *(True,) * 20)


def ending(source: str, *ranks: tuple[bool, ...], **more: Any) -> Ending:
    """Return an ending of one pass with collectives in two stages, whose scripts catch errors."""
    return Ending(
        "two stages", source, (ranks,), **{"dies": False, "catches": True, "lies": 0, **more}
    )


def went(ranks: Ranks, case: Ending, folder: Path) -> list[dict[str, Any]]:
    """Run an ending; return the outputs and errors of each rank, without any fault."""
    try:
        ranks.run(run, case, os.fspath(folder))
    except RankDied:
        assert case.lies or case.dies
    assert faults(case, os.fspath(folder)) == []
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("source", ["list", "DataLoader", "iterator"])
def test_uneven_data_is_an_error_on_both_ranks(
    two_ranks: Ranks, tmp_path: Path, source: str
) -> None:
    """Both raise after the steps that both have; once a rank drained alone and mixed up sums."""
    for told in went(two_ranks, ending(source, EVEN[:12], EVEN[:30]), tmp_path):
        assert told["end"] == "UnevenDataError"
        assert len(told["outputs"]) == 12


def test_an_error_of_one_rank_is_raised_on_both_where_each_step_is_agreed(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """It is raised at the same step; both go on, and the other rank's batch of it comes again."""
    one, other = went(two_ranks, ending("iterator", EVEN, LATE), tmp_path)
    assert one["errors"] == ["RankDataError"]
    assert other["errors"] == ["Planned"]
    assert len(one["outputs"]) == len(other["outputs"]) == 40


def test_in_steps_without_a_message_the_next_batch_takes_the_place_of_an_error(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Only the failing rank raises, in the error's place; both train on all batches."""
    one, other = went(two_ranks, ending("DataLoader", EVEN, LATE), tmp_path)
    assert one["errors"] == []
    assert other["errors"] == ["Planned"]
    assert len(one["outputs"]) == len(other["outputs"]) == 40


def test_a_length_that_is_not_that_of_the_data_is_told_at_once(tmp_path: Path) -> None:
    """The rank raises, and runs no collective that the other one would not match."""
    with Ranks(2) as ranks:
        one, other = went(ranks, ending("DataLoader", EVEN[:20], EVEN[:25], lies=5), tmp_path)
    assert one["errors"] == ["OutOfStepError"]
    assert other["end"] not in ("well", "UnevenDataError")


def _exchanges(length: int | None) -> int:
    """Return how often a rank exchanges its status in a pass of 160 batches."""
    exchanged = 0
    own = EvenData.exchange_status

    def counted(data: EvenData, status: int) -> Any:
        nonlocal exchanged
        exchanged += 1
        return own(data, status)

    EvenData.exchange_status = counted  # type: ignore[method-assign]
    training = Training()
    try:
        with pipeline_of("two stages", training) as pipe:
            source = iter(range(160)) if length else (n for n in range(160))
            assert sum(1 for _ in pipe.iterate(source)) == 160
    finally:
        EvenData.exchange_status = own  # type: ignore[method-assign]
    return exchanged


def test_ranks_that_know_their_length_tell_each_other_little(two_ranks: Ranks) -> None:
    """They communicate at the begin, in the last sixteenth and at the end; others at each step."""
    assert two_ranks.run(_exchanges, 160) == [1 + 10 + 2] * 2
    assert two_ranks.run(_exchanges, None) == [1 + 160 + 2] * 2


def test_a_pipeline_that_is_out_of_step_refuses_to_go_on() -> None:
    """The error says what has happened."""
    training = Training()
    with pipeline_of("two stages", training) as pipe:
        pipe._driver._passes.out_of_step = "planted"
        with pytest.raises(RuntimeError, match="out of step.*planted.*start the job again"):
            pipe.progress(iter([1]))


def _drained() -> tuple[int, int, int]:
    """Return the batches pulled ahead and in flight after a drain, and those ahead before it."""
    pulled = 0

    def data() -> Any:
        nonlocal pulled
        for batch in range(20):
            pulled += 1
            yield batch

    training, source = Training(), data()
    with pipeline_of("two stages", training) as pipe:
        steps = sum(1 for _ in range(5) if pipe.progress(source))
        before = pulled - steps - pipe.state_dict()["in_flight"]
        steps += len(pipe.drain())
        assert steps < 20  # it has not gone on to the end of the data
        found = (pulled - steps, pipe.state_dict()["in_flight"], before)
        assert sum(1 for _ in pipe.iterate(source)) == 20 - steps
    return found


def test_a_drain_finishes_what_the_ranks_have_pulled_early(two_ranks: Ranks) -> None:
    """Therefore the iterator keeps exactly its other batches, as on one rank."""
    assert two_ranks.run(_drained) == [(0, 0, 0)] * 2


@pytest.mark.parametrize(("kind", "agrees"), [("two stages", True), ("serial", False)])
def test_collectives_in_several_stages_ask_for_it(kind: str, agrees: bool) -> None:
    """If all collectives are in one stage, a rank drains in the order of the others."""
    with pipeline_of(kind, Training(), check_data=None) as pipe:
        assert (pipe._driver._passes is not None) is agrees


class Fails(Iterator[int]):
    """An iterator of one batch, an error, and another batch."""

    pulls = 0

    def __next__(self) -> int:
        self.pulls += 1
        if self.pulls == 2:
            raise ValueError("planted")
        if self.pulls > 3:
            raise StopIteration
        return self.pulls


def test_data_is_not_asked_for_more_before_its_error_was_raised() -> None:
    """This holds however far ahead it is pulled; a script may repair the data first."""
    data = Fails()
    batches = EvenData(ahead=3).over(data)
    assert next(batches) == 1
    with pytest.raises(ValueError, match="planted"):
        next(batches)
    assert data.pulls == 2
    assert [*batches] == [3]


@pytest.mark.parametrize("data", [Fails(), iter([1])])
def test_a_pass_that_is_paused_keeps_its_error_and_its_end(data: Iterator[int]) -> None:
    """Both are raised when the pass continues."""
    batches = EvenData(ahead=1).over(data)
    assert next(batches) == 1
    batches.paused = True
    assert [*batches] == []
    assert not batches.over
    batches.paused = False
    with pytest.raises((ValueError, StopIteration)):
        next(batches)
    assert [*batches] == ([3] if isinstance(data, Fails) else [])
    assert batches.over


class Guesses(Iterator[int]):
    """An empty iterator that estimates its length as 5."""

    def __next__(self) -> int:
        raise StopIteration

    def __length_hint__(self) -> int:
        return 5


def test_the_length_of_an_iterator_is_known_or_it_is_not() -> None:
    """An iterator that has begun has that many fewer; an estimate is no length."""
    data = iter([1, 2, 3])
    next(data)
    loader = iter(DataLoader(range(7), 2))  # type: ignore[arg-type]
    next(loader)
    assert [*map(batches_left, (data, iter(range(5)), loader))] == [2, 5, 3]
    assert [*map(batches_left, ((n for n in range(3)), map(str, [1]), Guesses()))] == [None] * 3

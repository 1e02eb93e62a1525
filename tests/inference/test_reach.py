"""What a task's code can reach: lengths, generators that have begun, and Python's iterators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from swpipe import PipelineTask
from swpipe.inference.reach import Reach, reach_of


class Rows:
    """Counts the rows that were read."""

    def __init__(self) -> None:
        self.rows, self.read = torch.ones(3), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.rows[index]


def reached(function: Callable[[Any], object]) -> Reach:
    """By a task of this function."""
    return reach_of(PipelineTask("task", function))


def names(reach: Reach) -> set[str]:
    """Of the values in objects and closures."""
    return {place.name for place in reach.places}


def test_a_length_alone_is_no_use_of_what_is_in_a_value() -> None:
    """Neither of a tensor, nor of what other methods of the object use."""
    rows = Rows()
    reach = reached(lambda ctx: len(rows) + ctx.iter_idx)
    assert id(rows.rows) not in reach.wholes
    assert names(reach) == {"rows"}


def test_a_value_of_which_more_than_the_length_is_used_is_searched() -> None:
    """Also where its length is used as well, or it goes by another name."""
    rows = Rows()

    def both(ctx: Any) -> None:
        ctx.x = rows[len(rows) - 1]

    def renamed(ctx: Any) -> None:
        other = rows
        ctx.x = len(rows) + other.rows.sum()

    assert id(rows.rows) in reached(both).wholes
    assert "read" in names(reached(both))
    assert id(rows.rows) in reached(renamed).wholes


def test_an_object_that_is_only_asked_for_attributes_is_not_looped_over() -> None:
    """Its item method is not called."""
    data = Rows()
    assert "read" not in names(reached(lambda ctx: data.rows))
    assert "read" in names(reached(lambda ctx: [row for row in data]))  # noqa: C416


def test_a_generator_that_has_begun_leads_to_the_variables_of_its_closure() -> None:
    """They are no longer in its frame as cells."""
    step = 0

    def numbers() -> Iterator[int]:
        yield step
        yield step

    generator = numbers()
    next(generator)

    def count(ctx: Any) -> None:
        nonlocal step
        step += 1

    shared = reached(lambda ctx: next(generator)).places.keys() & reached(count).places.keys()
    assert {place.name for place in shared} == {"step"}


def test_iterators_of_python_lead_to_what_they_are_made_of() -> None:
    """To their present part and to later ones."""
    first, second = Rows(), Rows()
    chain = itertools.chain(map(abs, [first.rows]), (row for row in [second.rows]))
    wholes = reached(lambda ctx: next(chain)).wholes
    assert id(first.rows) in wholes

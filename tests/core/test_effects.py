"""The effects of tasks, and the conflicts that follow from them."""

from __future__ import annotations

from itertools import product

import pytest

from swpipe import DeclaredIO, PipelineTask
from swpipe.core.effects import (
    DRAWS,
    UNDECLARED,
    Conflict,
    Declared,
    Effects,
    Location,
    conflicts,
    undeclared_effects,
)
from swpipe.core.task import Mode

X = Location("x", persistent=False)
MODEL = Location("model", persistent=True)


def touching(reads: set[Location] = frozenset(), writes: set[Location] = frozenset()) -> Effects:  # type: ignore[assignment]
    return Effects(frozenset(reads), frozenset(writes))


def test_an_attribute_is_fought_over_within_an_iteration_only() -> None:
    """Every iteration has its own."""
    table = {"make": touching(writes={X}), "use": touching(reads={X})}
    assert list(conflicts(table)) == [Conflict("use", "make", 0, X, "read after write")]


def test_a_state_is_fought_over_from_one_iteration_to_the_next() -> None:
    """Step conflicts with forward and with itself, and forward with the previous step."""
    table = {"forward": touching(reads={MODEL}), "step": touching({MODEL}, {MODEL})}
    assert set(conflicts(table)) == {
        Conflict("step", "forward", 0, MODEL, "write after read"),
        Conflict("forward", "step", 1, MODEL, "read after write"),
        Conflict("step", "forward", 1, MODEL, "write after read"),
        Conflict("step", "step", 1, MODEL, "read after write"),
    }


@pytest.mark.parametrize(
    ("mode", "effects"),
    [
        ("r", touching(reads={MODEL})),
        ("w", touching(writes={MODEL})),
        ("rw", touching({MODEL}, {MODEL})),
    ],
)
def test_declared_states_are_effects(mode: Mode, effects: Effects) -> None:
    """Their mode counts; an effect without a state is for the shortcut only."""
    silent = DeclaredIO(capture=lambda: None, restore=lambda kept: None)
    task = PipelineTask("a", print, io=[DeclaredIO(state="model", mode=mode), silent])
    assert Declared.by([task]).effects == {"a": effects}


def test_a_state_is_on_the_host_only_if_all_its_users_say_so() -> None:
    """Device work of one task conflicts with the function of another one, as with device work."""
    on_host = PipelineTask("a", print, io=[DeclaredIO(state="model", on_host=True)])
    silent = PipelineTask("b", print, io=[DeclaredIO(state="model")])
    for pair in ([on_host, silent], [silent, on_host]):
        found = conflicts(Declared.by(pair).effects)
        assert {conflict.place for conflict in found} == {MODEL}
        assert {conflict[:2] for conflict in found} == {*product("ab", repeat=2)}
    (alone,) = Declared.by([on_host]).effects["a"].writes
    assert alone == MODEL._replace(on_host=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "give a state, capture and restore, or reset"),
        ({"capture": dict}, "both capture and restore"),
        ({"state": ""}, "give a name"),
        ({"state": "x", "mode": "a"}, "'r', 'w' or 'rw'"),
        ({"capture": dict, "restore": print, "memory": []}, "memory is given without a state"),
        ({"state": "x", "on_host": True, "memory": []}, "give no memory of tensors"),
    ],
)
def test_a_declaration_must_make_sense(wrong: dict[str, object], says: str) -> None:
    """It says what is missing."""
    with pytest.raises(ValueError, match=says):
        DeclaredIO(**wrong)  # type: ignore[arg-type]


def test_undeclared_code_may_draw_and_touch_what_others_name() -> None:
    """It may use unnamed states, torch's generators, and each state without a restriction."""
    anything = {UNDECLARED, DRAWS}
    assert undeclared_effects() == Effects(frozenset(anything), frozenset(anything))
    model, log = Location("model", persistent=True), Location("log", persistent=True)
    named = [Effects(writes=frozenset({model, log, Location("x", persistent=False)}))]
    beside = undeclared_effects(named, unread={"log"}, unwritten={"log", "model"})
    assert beside == Effects(frozenset({*anything, model}), frozenset(anything))

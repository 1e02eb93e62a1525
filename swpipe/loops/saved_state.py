"""The form of a loop's saved state, and whether what is loaded has it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from swpipe._distributed.rank_checks import rank_count
from swpipe.core.messages import counted, listed, shown
from swpipe.loops.live_loaders import has_own_state
from swpipe.loops.pass_generators import PassGenerators

VERSION = 2

_OF_LOADER = ("loader", "loader_at_start", "loader_draws", "again")
_OF_GENERATORS = ("at_start", "after_pull", "generators")
_OF_PASS = ("batches", "ahead", *_OF_LOADER, *_OF_GENERATORS)
_KEYS = frozenset(["version", "ranks", "pipeline", *_OF_PASS])


def checked(
    state: object, owner: str, loader: Any, generators: PassGenerators, *, same_ranks: bool
) -> Mapping[str, Any]:
    """The state, if it is one of such a loop, and with ``same_ranks``, of as many ranks.

    Raises:
        ValueError: It is not, or is damaged, or of another kind of loader; it says how.
    """
    try:
        return _checked(state, loader, generators, rank_count() if same_ranks else None)
    except ValueError as error:
        raise ValueError(
            f"the state is not one that {owner}.state_dict() returned for such a loop: {error}"
        ) from error


def _checked(
    state: object, loader: Any, generators: PassGenerators, ranks: int | None
) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise ValueError(f"it is {shown(state)}")
    version = state.get("version", VERSION)  # where it has none, that is said below
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"its version is {shown(version)}, and this swpipe has {VERSION}: go on with "
            "the version of swpipe that saved it"
        )
    if different := _KEYS ^ {*state}:
        names = listed(sorted(map(shown, different)), most=3)
        raise ValueError(f"it lacks, or should not have, {names}")
    _check_numbers(state, ("batches", "ahead", "ranks"))
    if ranks not in (None, state["ranks"]):
        saved = counted(state["ranks"], "rank")
        raise ValueError(
            f"it was saved on {saved}, and this job has {ranks}, on which the loaders give other "
            f"batches: go on with {saved}; or begin a new pass, with models and optimizers alone; "
            "or, if each loader has the rest of its own batches, load_state_dict(state, "
            "check=False)"
        )
    pipeline = state["pipeline"]
    if not isinstance(pipeline, Mapping):
        raise ValueError(f"its pipeline is {shown(pipeline)}")
    _check_numbers(pipeline, ("next_iteration", "in_flight"))
    if type(pipeline.get("seed")) is not int:
        raise ValueError(f"its seed is {shown(pipeline.get('seed'))}: an integer")
    for name in ("at_start", "generators"):
        generators.check(state[name], name)
        if missing := {"torch", "python", *generators.own} - state[name].keys():
            raise ValueError(f"its {name} has no state of {listed(sorted(missing), most=3)}")
    if state["after_pull"] is not None:
        generators.check(state["after_pull"], "after_pull")
    _check_again(state["again"], generators)
    draws = state["loader_draws"]
    known = {"torch", "python", "numpy", *generators.own}
    if not isinstance(draws, list | tuple) or not all(
        isinstance(name, str) and name in known for name in draws
    ):
        raise ValueError(f"its loader_draws is {shown(draws)}")
    if (state["loader"] is not None) != has_own_state(loader):
        kind = "one with" if state["loader"] is not None else "one without"
        raise ValueError(
            f"it was saved of {kind} a state of its own, and the loader is a "
            f"{type(loader).__name__}: resume with a loader of the same kind"
        )
    return state


def _check_again(again: object, generators: PassGenerators) -> None:
    if not isinstance(again, list) or not all(
        isinstance(one, tuple | list) and len(one) == 2 for one in again
    ):
        raise ValueError(f"its again is {shown(again)}")
    for before, checksum in again:
        generators.check(before, "again")
        if checksum is not None:
            _check_numbers({"checksum": checksum}, ("checksum",))


def _check_numbers(values: Mapping[Any, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = values.get(name)
        if type(value) is not int or not 0 <= value <= sys.maxsize:
            raise ValueError(f"its {name} is {shown(value)}: an integer from 0")

"""The form of a loop's saved state, and the check that a loaded state has it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from torch import Tensor

from swpipe._distributed.rank_checks import rank_count
from swpipe.core.messages import counted, listed, shown
from swpipe.loops.pass_generators import is_default
from swpipe.loops.pulled_loader import PulledLoader

VERSION = 5

NEW_PASS: Mapping[str, Any] = {
    "batches": 0,
    "again": [],
    "after_pull": None,
    "loader_at_start": None,
}
"""What a state has if it leads to a new pass."""

OF_PLACE = (*NEW_PASS, "loader", "loader_draws", "in_turn", "at_start", "generators")
"""The keys of a state that lead to a place in a pass."""

_OF_LOADER = ("loader", "loader_at_start")
"""The keys of the loader's own state, which the loader checks itself."""


def complete(pipeline: Mapping[str, int], place: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the pipeline's state, a place in a pass, and a checksum."""
    state = {"version": VERSION, "ranks": rank_count(), "pipeline": pipeline, **place}
    return {**state, "checksum": _checksum(state)}


def why_not_loaded(state: object, of: PulledLoader, *, same_ranks: bool) -> str:
    """Return why a state cannot be loaded by a loop; empty if it can.

    Args:
        state: The state to check.
        of: The loop's loader.
        same_ranks: Whether the state must be of as many ranks as this job has.
    """
    # From the outermost property to the innermost: each test relies on the ones before it.
    if not isinstance(state, Mapping):
        return f"it is {shown(state)}"
    version = state.get("version", VERSION)
    if version != VERSION:
        return (
            f"its version is {shown(version)}, and this swpipe has {VERSION}: go on with "
            "the version of swpipe that saved it"
        )
    # A state of this version with this checksum has all keys, and values of the right types.
    if state.get("checksum") != _checksum(state):
        return (
            "its checksum is another one: it is the state of something else, or was damaged or "
            "changed after it was saved"
        )
    # A loader usually divides its data by rank, so another number of ranks has other batches.
    if same_ranks and state["ranks"] != rank_count():
        saved = counted(state["ranks"], "rank")
        return (
            f"it was saved on {saved}, and this job has {rank_count()}, on which the loaders give "
            f"other batches: go on with {saved}; or begin a new pass, with models and optimizers "
            "alone; or, if each loader has the rest of its own batches, load_state_dict(state, "
            "check=False)"
        )
    # Default generators may differ by machine. A loader's own have to match one to one.
    own = {name for name in state["generators"] if not is_default(name)}
    if own != of.generators.own:
        saved = listed(sorted(own), most=3) or "none"
        now = listed(sorted(of.generators.own), most=3) or "none"
        return (
            f"the random generators of its loader are {saved}, and those of this loop's loader "
            f"{now}: resume with a loader that is made in the same way"
        )
    if (state["loader"] is not None) != of.has_state:
        kind = "one with" if state["loader"] is not None else "one without"
        return (
            f"it was saved of {kind} a state of its own, and the loader is a "
            f"{type(of.loader).__name__}: resume with a loader of the same kind"
        )
    return ""


def _checksum(state: Mapping[str, Any]) -> int:
    """Return a checksum of all but the loader's own state, whatever containers a file uses."""
    # The keys of the loader's state count, and its values are the loader's to check.
    values = {key: None if key in _OF_LOADER else value for key, value in state.items()}
    values.pop("checksum", None)
    return crc32(repr(_plain(values)).encode())


def _plain(value: Any) -> Any:
    # Formats differ in their containers: JSON has no tuples, and torch.save keeps Tensors. So the
    # keys are sorted and sequences become lists.
    if isinstance(value, Mapping):
        return sorted(f"{key!r}: {_plain(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor):
        there = value.cpu().contiguous()
        # The bytes of a tensor, not its printed form, which leaves out values.
        data = ctypes.string_at(there.data_ptr(), there.nbytes) if there.nbytes else b""
        return [str(value.dtype), *value.shape, crc32(data)]
    return value

"""Values and texts that no plan, cost model or timeline should have, for fuzzing their readers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from swpipe.errors import PlanError

MOST_IN_ONE_LINE = 10_000
MOST_IN_ALL = 20_000

NAMES = st.sampled_from(
    ["a", "b", "c", "", "<admit>", "<retire>", "a\nb", "\x1b[31m", "\ud800", "\u202e", "n" * 9999]
)
NUMBERS = st.sampled_from(
    [0, 1, 2, 3, -1, 999, 1000, 1001, 10**9, 2**63, 2**70, 10**4000, 1.5, 1.7e308, -0.0, 1e12]
) | st.sampled_from([math.nan, math.inf, -math.inf])
SCALARS = NAMES | NUMBERS | st.none() | st.booleans()
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def table(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return some of these fields, and sometimes an unknown one."""
    return st.builds(
        lambda known, strange: {**known, **({"unknown": 1} if strange == 7 else {})},
        st.fixed_dictionaries({}, optional=fields),
        st.integers(0, 99),
    )


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return ``good`` 29 times in 30, and otherwise anything."""
    return st.integers(0, 29).flatmap(lambda n: ANYTHING if n == 7 else good)


def replaced(data: Any) -> st.SearchStrategy[str]:
    """Return ``data`` as JSON with one value, at any depth, replaced."""
    places = [*_places(data)]
    return st.builds(
        lambda place, value: json.dumps(_with(data, place, value)),
        st.sampled_from(places),
        ANYTHING,
    )


def _places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = data.items() if isinstance(data, Mapping) else ()
    inner = enumerate(data) if isinstance(data, list) else inner
    return [at, *(place for key, value in inner for place in _places(value, (*at, key)))]


def _with(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = dict(data) if isinstance(data, Mapping) else list(data)
    copy[place[0]] = _with(data[place[0]], place[1:], value)
    return copy


def edited(text: str) -> st.SearchStrategy[str]:
    """Return ``text`` with a part replaced by another part, or by a few characters."""
    at = st.integers(0, len(text))
    part = st.builds(lambda a, b: text[min(a, b) : max(a, b)], at, at)
    return st.builds(
        lambda a, b, new: text[: min(a, b)] + new + text[max(a, b) :],
        at,
        at,
        part | st.text(max_size=4) | st.sampled_from(["[" * 5000, "9" * 5000, "a." * 5000, "\x00"]),
    )


def check_message(error: Exception) -> None:
    """Check that a message is short, and has nothing that a terminal would obey."""
    text = str(error)
    assert len(text) <= MOST_IN_ALL
    assert text.replace("\n", "").isprintable()
    line = error.in_one_line if isinstance(error, PlanError) else text
    assert len(line) <= MOST_IN_ONE_LINE
    assert line.isprintable()

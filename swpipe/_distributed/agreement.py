"""The facts of a plan, which show in what the plans of two ranks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice, takewhile
from typing import TypeAlias

import torch

from swpipe.core.messages import MOST_CHARACTERS, shorten
from swpipe.core.plan import PipelinePlan, TaskSchedule

Facts: TypeAlias = Mapping[str, str]
"""A plan's facts by name; a fact that a rank does not have counts as ``"none"``."""

# The largest number of facts in a message.
_MOST = 4
# The largest number of ranks that a message lists.
_RANKS = 8
# The largest number of different values of a fact in a message.
_VALUES = 4
# The number of characters before the first difference of long values in a message.
_AGREED = 40


def plan_facts(plan: PipelinePlan) -> dict[str, str]:
    """Return a plan's data as facts.

    Plans with equal facts have an equal ``PipelinePlan.digest``.
    """
    facts = {"digest": plan.digest()[:12]}  # it alone depends on the order of the schedule
    for key, value in plan.agreed_fields().items():
        if key == "schedule":
            facts |= {f"task {name!r}": _entry(entry) for name, entry in value.items()}
        elif key.endswith("deps"):
            facts |= {f"{key} {entry}": "given" for entry in value}
        else:
            facts[key] = str(value) if not isinstance(value, tuple) else ", ".join(value) or "none"
    return facts


def differences(held: Sequence[Facts]) -> str:
    """Return the differences between ranks on one line; empty if there are none.

    ``held`` is by rank.
    """
    texts = []
    for fact in dict.fromkeys(chain.from_iterable(held)):
        values = [facts.get(fact, "none") for facts in held]
        if len(set(values)) > 1:
            texts.append(f"{fact}: {_by_value(values)}")
    more = len(texts) - _MOST
    return "; ".join(texts[:_MOST]) + (f"; and {more} more" if more > 0 else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0, 1", with the first few of many ranks."""
    listed = ", ".join(map(str, ranks[:_RANKS]))
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    start = 0
    if max(map(len, ranks)) > MOST_CHARACTERS:
        same = takewhile(lambda at: len({*at}) == 1, zip(*ranks, strict=False))
        start = max(0, sum(1 for _ in same) - _AGREED)
    texts = [
        f"{'...' if start else ''}{shorten(value[start:])} on {name_ranks(on)}"
        for value, on in islice(ranks.items(), _VALUES)
    ]
    more = len(ranks) - _VALUES
    return ", ".join(texts) + (f", and {more} other values" if more > 0 else "")


def _entry(entry: TaskSchedule) -> str:
    """Return every field of a task's entry.

    A ``torch.Stream`` has another number in each process.
    """
    values = {f.name: getattr(entry, f.name) for f in fields(entry)}
    shown = {k: "a torch.Stream" if isinstance(v, torch.Stream) else v for k, v in values.items()}
    return f"({', '.join(f'{key} {value}' for key, value in shown.items())})"

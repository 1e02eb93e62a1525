"""Random tasks with known accesses: a recording finds exactly these."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swpipe.core.effects import DRAWS, conflicts
from swpipe.core.plan import BODY, OTHERS
from swpipe.inference import Recording, record
from swpipe.inference.orders import Edge, Orders, edge_of
from tests.inference.helpers import WORD
from tests.support.budget import examples
from tests.support.machines import TorchMachine, tasks_of
from tests.support.strategies import Workload, dependences_of, random_workload

pytestmark = pytest.mark.slow


def stated(workload: Workload) -> dict[str, tuple[set[str], set[str]]]:
    """Return the declared reads and writes of each task."""
    table = {}
    for spec in workload.tasks:
        # Who computes nothing never looks at what is in a state.
        looks = bool(spec.sets) or any(use.writes for use in spec.states)
        read = {*spec.reads, *(use.state for use in spec.states if looks)}
        written = {*spec.sets, *spec.deletes, *(use.state for use in spec.states if use.writes)}
        table[spec.name] = (read, written)
    return table


def seen(recording: Recording, workload: Workload) -> dict[str, tuple[set[str], set[str]]]:
    """Return the recorded reads and writes; states have the machine's names."""

    def plain(name: str) -> str:
        members = recording.states.get(name, (name,))
        return next((s for s in workload.slots for m in members if re.search(rf"\b{s}\b", m)), name)

    return {
        task: (
            {plain(p.name) for p in e.reads - {DRAWS}} - {WORD.state},
            {plain(p.name) for p in e.writes},
        )
        for task, e in recording.effects.items()
        if task != BODY
    }


@examples("plans", 15)
@given(st.randoms(use_true_random=False))
def test_recorded_effects_are_the_stated_ones(rng: random.Random) -> None:
    """Attributes and states are recorded; the dependences imply the order of the serial run."""
    workload = random_workload(rng)
    machine = TorchMachine(workload, lambda: None)
    tasks = [replace(task, io=[*task.io, WORD]) for task in tasks_of(machine, workload, draws=True)]
    state = {f"{n}[{k}]": s for n, slots in machine.states.items() for k, s in enumerate(slots)}
    recording = record(tasks, rng.choice((None, 3)), device="cpu", state=state)
    found, true = seen(recording, workload), stated(workload)
    assert found == true

    needed = recording.dependences()
    edges = [Edge(c, p, 0) for c, p in needed.deps] + [Edge(*e) for e in needed.cross_iter_deps]
    # Dependences are between tasks; planners keep those that share a state with the body in place.
    effects = {name: of for name, of in recording.effects.items() if name not in OTHERS}
    kept = Orders(tuple(effects), edges)
    lost = [c for c in conflicts(effects) if not kept.implies(edge_of(c))]
    assert lost == []
    for edge in edges:
        rest = Orders(tuple(effects), [other for other in edges if other != edge])
        assert not rest.implies(edge), f"{edge} is implied by the others"
    for edge in dependences_of(workload):
        if edge.consumer in looking(workload) and edge.producer in looking(workload):
            assert kept.implies(Edge(*edge))


def looking(workload: Workload) -> set[str]:
    """Return the tasks whose use of states is visible in their actions."""
    return {t.name for t in workload.tasks if t.sets or any(use.writes for use in t.states)}

"""From what was seen to what each task touches.

What lies in a slot (a parameter, a gradient) is a state. So is memory that persistent the iteration
without one; it has no name, and gets a description. All else belongs to the iteration, and is
reached through attributes of the context: whoever gets hold of it read an attribute, and so comes
after the task that set it. Only what is *modified in place* asks for more, since several attributes
may share it (views, lists). It then counts as part of the attribute that held it first, its home::

    ctx.a = x          writes a
    ctx.b = ctx.a[0]   reads a, writes b
    y = ctx.a + 1      reads a
    ctx.b.zero_()      reads b, writes b and a: after y was made
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swpipe.inference.facts import IterationFacts, TaskFacts
from swpipe.inference.moment import Entry
from swpipe.inference.slots import Slot
from swpipe.inference.storages import StorageId, Storages


class Use(NamedTuple):
    """How a task uses something."""

    reads: bool = False
    writes: bool = False

    def __or__(self, other: tuple[bool, ...]) -> Use:
        return Use(self.reads or other[0], self.writes or other[1])


READS, WRITES, BOTH = Use(True, False), Use(False, True), Use(True, True)


@dataclass
class Uses:
    """What one task touches.

    Attributes:
        attributes: Name to use.
        slots: Slot to use. What has no slot of its own (a generator, memory without a name) is
            given one here.
        silent: Slots and attributes that it modified without any operator saying so; their names.
    """

    attributes: dict[str, Use] = field(default_factory=lambda: defaultdict(Use))
    slots: dict[Slot, Use] = field(default_factory=lambda: defaultdict(Use))
    silent: set[str] = field(default_factory=set)


def resolve(iterations: Iterable[IterationFacts], storages: Storages) -> dict[str, Uses]:
    """Task to what it touches in any of the iterations."""
    iterations = tuple(iterations)
    uses: dict[str, Uses] = {facts.task: Uses() for facts in iterations[0].tasks}
    for iteration in iterations:
        resolver = _Iteration(iteration, alone=len(iterations) == 1)
        for facts in iteration.tasks:
            resolver.attributes(facts, uses[facts.task])
            resolver.states(facts, uses[facts.task])
            _others(facts, uses[facts.task])
    _nameless(iterations, storages, uses)
    return uses


class _Iteration:
    """One iteration: whose the storages are, and what was modified in place after it was made.

    Args:
        iteration: What was seen of it.
        alone: There is no other. What it made for good does not show then.
    """

    def __init__(self, iteration: IterationFacts, *, alone: bool) -> None:
        self._before, self._alone = iteration.before, alone
        self._home: dict[Entry, str] = {}
        self._modified: dict[str, frozenset[Entry]] = {}
        known = set(iteration.before)
        for facts in iteration.tasks:
            for name, items in facts.held.items():
                for item in items:
                    self._home.setdefault(item, name)
                known |= {item.number for item in items if item.kind == "storage"}
            # What the task itself made is not modified, however it was made.
            written = (facts.written | facts.difference.storages) & known
            self._modified[facts.task] = facts.difference.items | {
                Entry("storage", number) for number in written if not self._is_state(number)
            }
            known |= facts.met
        self._shared = frozenset[Entry]().union(*self._modified.values())

    def _is_state(self, number: StorageId) -> bool:
        return number in self._before

    def attributes(self, facts: TaskFacts, uses: Uses) -> None:
        """What the task does to attributes, by their names and by what they hold."""
        for name in facts.reads:
            uses.attributes[name] |= READS
        for name in facts.sets | facts.deletes:
            uses.attributes[name] |= WRITES
        used = frozenset[Entry]().union(*(facts.held.get(name, ()) for name in facts.reads))
        used |= {Entry("storage", number) for number in facts.read | facts.written}
        for item in used & self._shared:
            if item in self._home:
                uses.attributes[self._home[item]] |= READS
        for item in self._modified[facts.task]:
            names = {name for name, items in facts.held.items() if item in items}
            for name in names | ({self._home[item]} if item in self._home else set()):
                uses.attributes[name] |= WRITES
                if item.number in facts.difference.silent - facts.written:
                    uses.silent.add(f"ctx.{name}")

    def states(self, facts: TaskFacts, uses: Uses) -> None:
        """What the task does to what lies in slots."""
        through_context = frozenset(
            item.number
            for name in facts.reads
            for item in facts.held.get(name, ())
            if item.kind == "storage" and item not in self._shared
        )
        for slot, inside in facts.slots.items():
            # What this iteration made, and an attribute led to, is no reading of the slot; nor is
            # what autograd's engine read by itself (where it adds to a gradient, it writes too).
            saved = frozenset() if self._alone else facts.replayed
            if facts.read & inside - ((through_context | saved) - self._before):
                uses.slots[slot] |= READS
            if (facts.written | facts.difference.storages) & inside:
                uses.slots[slot] |= WRITES
            if (facts.difference.silent - facts.written) & inside:
                uses.silent.add(slot.name)
        for slot in sorted(facts.difference.slots):
            uses.slots[slot] |= WRITES


def _others(facts: TaskFacts, uses: Uses) -> None:
    """States that are no tensors, and yet are seen: generators, and the options of optimizers."""
    for name in facts.difference.generators:
        uses.slots[Slot(name, name, "")] |= BOTH
    for name in facts.difference.options:
        uses.slots[options_of(name)] |= WRITES
    for name in facts.stepped:
        uses.slots[options_of(name)] |= READS


def options_of(optimizer: str) -> Slot:
    """The slot of what an optimizer's groups say beside the parameters, the learning rate say."""
    return Slot(f"{optimizer} options", optimizer, "options")


def _nameless(
    iterations: Iterable[IterationFacts], storages: Storages, uses: Mapping[str, Uses]
) -> None:
    """Memory that persistent an iteration, and that lies in no slot."""
    slots: dict[StorageId, Slot] = {}
    touched: dict[Slot, set[tuple[int, str]]] = defaultdict(set)
    found: dict[str, dict[Slot, Use]] = {task: defaultdict(Use) for task in uses}
    for index, iteration in enumerate(iterations):
        named = _named(iteration)
        lasting = iteration.before | iteration.survivors
        for facts in iteration.tasks:
            for number in (facts.read | facts.written | facts.made) & lasting - named:
                slot = slots.setdefault(number, _described(storages.looks(number), facts.task))
                made = number in facts.made
                found[facts.task][slot] |= (number in facts.read, made or number in facts.written)
                if not made:
                    touched[slot].add((index, facts.task))
    for task, of_task in found.items():
        for slot, use in of_task.items():
            written = any(other.get(slot, Use()).writes for other in found.values())
            if written and touched[slot]:
                uses[task].slots[slot] |= use


def _named(iteration: IterationFacts) -> set[StorageId]:
    """What lies in slots, and what this iteration made and put into the context."""
    slots: set[StorageId] = set()
    held: set[StorageId] = set()
    for facts in iteration.tasks:
        slots = slots.union(*facts.slots.values())
        held |= {item.number for items in facts.held.values() for item in items}
    return slots | (held - iteration.before)


def _described(looks: str, task: str) -> Slot:
    name = f"memory without a name ({looks}, first met in {task!r})"
    return Slot(name, name, "")

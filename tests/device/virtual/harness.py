"""Runs of a random case on the virtual device, with a report of everything that went wrong.

iterator ── batch, on the device or not ──> pipeline ── context ──> copied out, kept, dropped
   │
   └── asks the device: is the iteration ``depth + run_ahead`` before known to be done?
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from swpipe import IterContext, SWPipeline
from swpipe._engine.waiting import Host
from swpipe.core.plan import StreamSpec
from tests.device.virtual import Buffer, Violation, VirtualDevice, Work
from tests.device.virtual.machine import OutOfTurn, PlantedError, VirtualMachine, turns_of
from tests.device.virtual.meaning import MeantDevice
from tests.support.exploring import ExploringHost
from tests.support.machines import PlainMachine, outputs, serial_outputs
from tests.support.strategies import Case, with_run_ahead

UNSEEN: dict[str, Any] = {}
"""Stands for the outputs of an iteration that the test did not read."""


class WrongNumber(Violation):
    """A value differs from that of the serial run."""


@dataclass
class Finding:
    """The faults of one run: violations, and the error that it raised, if any."""

    violations: list[Violation] = field(default_factory=list)
    error: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self.violations) or self.error is not None

    def shows(self, kinds: tuple[type[Exception], ...]) -> bool:
        """Return whether a violation or the error is of one of ``kinds``."""
        return any(isinstance(one, kinds) for one in (*self.violations, self.error))


class Bench:
    """A case with its device, states, tasks, pipeline, and the caller with a stream."""

    def __init__(self, case: Case, host: Host | None, *, observed: bool) -> None:
        self.case = case
        self.rng = rng = random.Random(case.seed)
        self.device = device = MeantDevice(case.seed, host)
        self.stream = rng.choice((device.current_stream(), device.new_stream(StreamSpec())))
        pause = host.pause if isinstance(host, ExploringHost) else lambda: None
        # Where a plan names no stream, what tasks drop themselves is not held.
        streams = case.plan.names_streams
        drops = any(spec.deletes or "batch" in spec.sets for spec in case.workload.tasks)
        apart = case.plan.keep is not None and (streams or not drops)
        self.loaders_stream = device.new_stream(StreamSpec()) if apart else None
        with device.on(self.stream):
            self.machine = VirtualMachine(device, case, pause)
        self._admitting = True
        self.keeper = Keeper(device, rng.choice((1, 1, 2, 4)))
        self.pipe = SWPipeline(
            case.plan,
            self.machine.tasks(),
            device=device,
            stall_timeout_s=None,
        )
        if observed:
            self._observing = self.pipe.observe(device)  # for as long as the pipeline lives
            self._observing.__enter__()

    def batches(self) -> Iterator[Any]:
        """Yield batches: on the host, or made on the caller's stream, bare or in a container."""
        device = self.device
        for i, batch in enumerate(self.case.batches):
            self._ask_for_room(i)
            kind = self.rng.randrange(4)
            if batch is None or kind == 0:
                yield batch
            elif self.loaders_stream is not None and kind == 1 and self._admitting:
                yield self._made_elsewhere(batch, i)
            else:
                made = device.launch(lambda batch=batch: batch, work=Work("<admit>", i))
                yield (made, [made], {"x": made})[kind - 1]
                del made
        self._ask_for_room(len(self.case.batches))

    def _made_elsewhere(self, batch: Any, i: int) -> Buffer:
        """Return a batch that the loader makes on a stream of its own."""
        made_by = self.device.new_event()
        with self.device.on(self.loaders_stream):
            made = self.device.launch(lambda: batch, work=Work("<admit>", i))
            made_by.record(self.loaders_stream)
        made_by.wait(self.device.current_stream())
        return made

    def _ask_for_room(self, i: int) -> None:
        limit = self.case.plan.launch_limit
        if self._admitting and limit is not None:
            self.device.expect_done(i - self.case.plan.depth - limit)

    def progress(self, iterator: Iterator[Any]) -> None:
        """Call ``progress`` once, and take its context."""
        self.device.leave()  # what is recorded before the first task has no meaning
        ctx = self.pipe.progress(iterator)
        self.device.leave()
        self.keeper.take(ctx)

    def run_one_serially(self, batches: Iterator[Any]) -> None:
        """Run one iteration between two runs; it is not admitted, and waits for no other."""
        self._admitting = False
        report = self.pipe.run_serial(islice(batches, 1))
        self._admitting = True
        self.keeper.found += [UNSEEN] * report.iterations

    def find(self, run: Callable[[], object]) -> Finding:
        """Run on the caller's stream, and return everything that went wrong."""
        try:
            with self.device.on(self.stream):
                run()
        except BaseException as error:  # noqa: BLE001 - with a guard taken away, anything may come
            return Finding(self.device.violations, error)
        return Finding(self.device.violations)


class Keeper:
    """A user who copies outputs on the caller's stream, and keeps contexts for a while.

    Attributes:
        found: The outputs, by iteration.
    """

    def __init__(self, device: VirtualDevice, kept: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._device = device
        self._kept: deque[IterContext] = deque(maxlen=kept)

    def take(self, ctx: IterContext) -> None:
        """Copy the outputs of a context, and keep the context."""
        self.found.append({name: self._copy(value) for name, value in outputs(ctx).items()})
        self._kept.append(ctx)

    def _copy(self, value: Any) -> Any:
        return self._device.launch(lambda v: v, value) if isinstance(value, Buffer) else value


# ------------------------------------------------------------------------------ to the end


def run_any(case: Case) -> Finding:
    """Run a case to its end, with random interleaving and, at random, an observer."""
    host = None if case.seed % 3 else ExploringHost(case.seed)
    return run_case(with_run_ahead(case), host=host, observed=bool(case.seed % 2))


def run_case(case: Case, *, host: Host | None = None, observed: bool = True) -> Finding:
    """Run a case to its end, with its drains, and compare all numbers."""
    bench = Bench(case, host, observed=observed)
    return bench.find(lambda: (_run_to_the_end(bench), _compare(bench)))


def _run_to_the_end(bench: Bench) -> None:
    batches = bench.batches()
    iterator = _another(batches)
    with bench.pipe as pipe, suppress(StopIteration):
        while True:
            bench.progress(iterator)
            if len(bench.keeper.found) in bench.case.drains:
                for ctx in pipe.drain():
                    bench.keeper.take(ctx)
                if bench.rng.random() < 0.3:
                    bench.run_one_serially(batches)
                iterator = _another(batches)
    bench.device.synchronize()


def _another(batches: Iterator[Any]) -> Iterator[Any]:
    """Return a new iterator over the same batches."""
    return iter(lambda: next(batches), object())


def _compare(bench: Bench) -> None:
    case, device = bench.case, bench.device
    plain = PlainMachine(case.workload)
    truth = serial_outputs(plain, case.workload, case.batches, case.plan.keep)
    found = [{name: _look(device, v) for name, v in x.items()} for x in bench.keeper.found]
    wanted = [UNSEEN if not seen else x for x, seen in zip(truth, found, strict=False)]
    if found != wanted or len(found) != len(truth):
        device.report(WrongNumber(f"outputs {found} are not {truth}"))
    states = {n: [device.read(s) for s in slots] for n, slots in bench.machine.states.items()}
    states |= {n: [s[0] for s in slots] for n, slots in bench.machine.plain.states.items()}
    plain_states = {n: [slot[0] for slot in slots] for n, slots in plain.states.items()}
    if states != plain_states:
        device.report(WrongNumber(f"states {states} are not {plain_states}"))
    if not case.drains:
        turns = turns_of(case, bench.pipe._driver.engine.program)
        if bench.machine.turns != turns:
            device.report(OutOfTurn(f"turns {bench.machine.turns} are not {turns}"))


def _look(device: VirtualDevice, value: Any) -> Any:
    return device.read(value) if isinstance(value, Buffer) else value


# ------------------------------------------------------------------------------ broken off


def break_any(case: Case) -> Finding:
    """Run a case that fails on the way or, in half of the cases, is closed."""
    host = ExploringHost(case.seed) if case.seed // 2 % 2 else None
    return break_case(with_run_ahead(case), host=host, close=bool(case.seed % 2))


def break_case(case: Case, *, host: Host | None = None, close: bool = False) -> Finding:
    """Let a random task or the iterator fail, or close the pipeline on the way.

    Afterwards the caller uses the states, and a pipeline that failed runs again. Only the device's
    rules are checked.
    """
    bench = Bench(case, host, observed=True)
    return bench.find(lambda: _close_early(bench) if close else _fail(bench))


def _close_early(bench: Bench) -> None:
    batches = bench.batches()
    with bench.pipe, suppress(StopIteration):
        for _ in range(bench.rng.randint(0, len(bench.case.batches))):
            bench.progress(batches)
    _use_states(bench)
    bench.device.synchronize()


def _fail(bench: Bench) -> None:
    batches, rng, case = bench.batches(), bench.rng, bench.case
    at = rng.randint(0, len(case.batches))
    task = rng.choice([None, *(spec.name for spec in case.workload.tasks)])
    iterator = _failing(batches, at) if task is None else batches
    bench.machine.fails_at = None if task is None else (task, at)
    with bench.pipe, suppress(StopIteration):
        with suppress(PlantedError):
            while True:
                bench.progress(iterator)
        bench.machine.fails_at = None
        _use_states(bench)
        while True:
            bench.progress(batches)
    _use_states(bench)
    bench.device.synchronize()


def _failing(batches: Iterator[Any], at: int) -> Iterator[Any]:
    """Yield the first ``at`` batches, and then raise an error that loses none."""
    yield from islice(batches, at)
    raise PlantedError


def _use_states(bench: Bench) -> None:
    for slots in bench.machine.states.values():
        for slot in slots:
            bench.device.launch(lambda v: v + 1, slot, into=slot)

"""Random cases without streams: host waits alone must suffice, in any order of the threads."""

from __future__ import annotations

from swpipe import SWPipeline
from tests.support.cpu_on import CpuOn
from tests.support.exploring import ExploringHost
from tests.support.machines import PlainMachine, outputs, serial_outputs, tasks_of
from tests.support.strategies import Case


def wrong_on_cpu(case: Case) -> object:
    """Return whether outputs or states differ from the serial ones, or the error of the run."""
    host = ExploringHost(case.seed)
    plain, machine = PlainMachine(case.workload), PlainMachine(case.workload)
    machine.pause = host.pause  # type: ignore[method-assign]
    try:
        with SWPipeline(
            case.plan,
            tasks_of(machine, case.workload),
            device=CpuOn(host),
            stall_timeout_s=None,
        ) as pipe:
            found = [outputs(ctx) for ctx in pipe.iterate(case.batches)]
    except Exception as error:  # noqa: BLE001 - with a guard taken away, anything may come
        return error
    truth = serial_outputs(plain, case.workload, case.batches, case.plan.keep)
    return found != truth or machine.states != plain.states

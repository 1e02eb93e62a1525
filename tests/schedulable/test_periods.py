"""Which task runs in which period, on which batch: the formula of the seed's section 3.4."""

from __future__ import annotations

from itertools import product

import pytest

from swpipe.schedulable import SchedulablePipeline, ThreadedExecutor
from tests.schedulable.work import ONE_STREAM, Log, one_stage, results

EXECUTORS = (None, "threaded", ThreadedExecutor("per_task"))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("batches", "most"), [*product((0, 1, 3, 5), (0, 1, 2, 3))])
def test_a_task_fires_by_the_formula(batches: int, most: int, executor: object) -> None:
    """At lookahead k in period i iff L - k <= i < M + L - k; M batches give M results."""
    log = Log()
    tasks = [log.task(f"k{k}", lookahead=k, writes=[f"s{k}"]) for k in range(most, -1, -1)]
    tasks.append(log.task("last", reads=["s0"], writes=["step_result"]))
    with SchedulablePipeline(one_stage(*tasks), ONE_STREAM, executor=executor) as pipe:
        assert list(results(pipe, range(batches))) == list(range(batches))
        for k in range(most + 1):
            fired = [i for i in range(20) if most - k <= i < batches + most - k]
            assert log.periods(f"k{k}") == [(i, i - (most - k)) for i in fired]
        log.runs.clear()
        assert list(results(pipe, range(2))) == [0, 1]  # periods count from 0 again
        assert log.periods(f"k{most}") == [(0, 0), (1, 1)]

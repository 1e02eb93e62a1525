"""Tables with a queue of prefetches: trained, shortcut, failing, profiled, recorded."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe import SWPipeline, TaskProfiler
from swpipe.inference import record
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.plans.torchrec.sparse_dist import EMBED, PREFETCH
from swpipe.tasks.torchrec import (
    RewriteError,
    SparseDistTasks,
    TaskOptions,
    TrainStep,
)
from swpipe.tasks.torchrec._torchrec import JaggedTensor
from swpipe.tasks.torchrec.embedding_tables.prefetched import PrefetchedBatches
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from tests.support.ranks import Ranks
from tests.tasks.torchrec.cached import (
    CacheOverflow,
    DynamicTables,
    dynamic,
    left_behind,
    rows_of,
    saving,
)
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    put_back,
)
from tests.tasks.torchrec.trial import (
    EXACT,
    STALE,
    Outcome,
    by_torchrec,
    create,
    to_the_end,
)

STEPS = 8
JOB = Job("row_wise", pooled=False)


def _by_torchrec() -> tuple[Outcome, list[DynamicTables]]:
    """Train in TorchRec's plain loop, on tables with room for everything."""
    model, groups = dynamic(JOB, 10_000)
    outcome = by_torchrec(JOB, batches(STEPS), model)
    return Outcome(outcome.outputs, outcome.state | rows_of(groups)), groups


def _train(model: Any, groups: list[DynamicTables], plan: str, forward: Kind) -> Outcome:
    owner = _tasks(model, forward)
    with SWPipeline(plans.PLANS[plan](), owner.tasks(), device="cpu", stall_timeout_s=60.0) as pipe:
        outputs = [ctx.output for ctx in pipe.iterate(batches(STEPS))]
    owner.rewrite.detach()
    return Outcome(outputs, everything(model) | rows_of(groups))


def _tasks(model: Any, forward: Kind, **options: Any) -> SparseDistTasks:
    step = TrainStep([dense_optimizer(JOB, model)])
    return SparseDistTasks(model, step, TaskOptions(forward=forward, **options), device="cpu")


def _behind_cache(plan: str, forward: Kind) -> list[str]:
    """Return the faults of a training with as many lines as the largest batch has keys."""
    wanted, roomy = _by_torchrec()
    lines = torch.tensor(max(group.most for group in roomy))
    dist.all_reduce(lines, dist.ReduceOp.MAX)
    model, groups = dynamic(JOB, int(lines), counted=True)
    wrong = _train(model, groups, plan, forward).differences(wanted) + left_behind(groups)
    if not all(0 < group.most <= int(lines) for group in groups):
        wrong.append("more keys were outstanding")
    given = torch.tensor([sum(batch.ids.lengths()) for batch in batches(STEPS)])
    counted = torch.tensor([group.counters for group in groups]).sum(0)
    for counts in (given, counted):
        dist.all_reduce(counts)
    return wrong + ([] if torch.equal(counted, given.float()) else [f"{counted} of {given}"])


@pytest.mark.parametrize(("plan", "forward"), [("prefetch", "prefetch"), ("split", "split")])
def test_a_cache_of_one_batch_is_enough(two_ranks: Ranks, plan: str, forward: Kind) -> None:
    """Each batch is looked up before the next is prefetched; numbers are the plain loop's.

    TorchRec's `prefetch` passes no counters on: each key would count once in a batch.
    """
    assert two_ranks.run(_behind_cache, plan, forward) == [[], []]


# --------------------------------------------------------------------------- shortcuts


SPLIT = EXACT[3]


def _made(name: str, lines: int | None = 200, **options: Any) -> Any:
    model, groups = dynamic(JOB, lines)
    return create(name, model, JOB, **options), model, groups


def _after_shortcut(task: str) -> tuple[list[str], list[str]]:
    """Return the remains of a shortcut task, and how later batches differ from TorchRec's.

    Shortcuts are enabled and disabled with batches in flight.
    """
    pipeline, model, groups = _made(SPLIT)
    capture, restore = saving(groups)
    with pipeline:
        data = batches(8)
        for _ in range(2):
            pipeline.progress(data)
        pipeline.pipe.enable_shortcut(task)
        for _ in range(4):
            pipeline.progress(data)
        pipeline.pipe.disable_shortcut()
        to_the_end(pipeline, data)
        left = left_behind(groups)
        dense, rows = everything(model), capture()
        outputs = to_the_end(pipeline, batches(3, seed=1))
        got = Outcome(outputs, everything(model) | rows_of(groups))
    put_back(model, dense)
    restore(rows)
    wanted = by_torchrec(JOB, batches(3, seed=1), model)
    return left, got.differences(Outcome(wanted.outputs, wanted.state | rows_of(groups)))


@pytest.mark.parametrize("task", [EMBED, "EmbBackward"])
def test_a_shortcut_leaves_no_prefetch_behind(two_ranks: Ranks, task: str) -> None:
    """Later batches look up their own ids, and find room."""
    assert two_ranks.run(_after_shortcut, task) == [([], []), ([], [])]


def _dropped_and_replayed() -> list[str]:
    """Drop a batch between its dense and its table backward, and replay the cut of the graph."""
    pipeline, _, groups = _made(SPLIT)
    without_ids = next(batches(1))
    without_ids.ids = without_ids.dense  # which can be copied, and not exchanged
    data = [*batches(4), without_ids, *batches(3)]
    with pipeline:
        trained = iter(data)
        for _ in range(2):
            pipeline.progress(trained)
        pipeline.pipe.enable_shortcut("DenseForward")
        with pytest.raises(AttributeError, match="'Tensor' object"):
            pipeline.progress(trained)
        rows = rows_of(groups)
        to_the_end(pipeline, batches(4))
        pipeline.pipe.disable_shortcut()
        changed = Outcome([], rows_of(groups)).differences(Outcome([], rows))
        left = left_behind(groups)
        to_the_end(pipeline, batches(3))
        return [*left, *changed]


def test_a_replayed_cut_trains_no_dropped_batch(two_ranks: Ranks) -> None:
    """Its rows are no longer pinned, and may belong to another batch."""
    assert two_ranks.run(_dropped_and_replayed) == [[], []]


# --------------------------------------------------------------------------- failures


def _fails_at(place: str, count: int, at: int, groups: list[DynamicTables]) -> Iterator[Batch]:
    for number, batch in enumerate(batches(count)):
        if number == at and place == "dense part":
            yield Batch(batch.dense[:, :2], batch.ids, batch.labels)
        elif number == at and place == "iterator":
            raise RuntimeError("the reader failed")
        else:
            for group in groups:
                group.fails |= number == at and place == "look-up"
            yield batch


def _left_by_failure(name: str, forward: Kind, place: str, lines: int | None) -> list[str]:
    pipeline, _, groups = _made(name, lines, forward=forward)
    left = []
    with pipeline:
        for at in (2, 4):
            with pytest.raises(RuntimeError, match="shapes|reader failed|look-up failed"):
                to_the_end(pipeline, _fails_at(place, 6, at, groups))
            left += left_behind(groups)
            for group in groups:
                group.fails = False
        outputs = to_the_end(pipeline, batches(3))
        left += [] if len(outputs) == 3 else ["batches"]
        left += left_behind(groups)
    return left


@pytest.mark.parametrize(
    ("name", "forward", "place", "lines"),
    [
        (EXACT[1], "pipelined", "look-up", 200),
        (EXACT[2], "prefetch", "dense part", 200),
        (SPLIT, "split", "look-up", None),
        (SPLIT, "split", "iterator", 200),
        (STALE, "split", "dense part", 200),
        (STALE, "split", "look-up", 200),
    ],
)
def test_a_failure_leaves_no_prefetch_behind(
    two_ranks: Ranks, name: str, forward: Kind, place: str, lines: int | None
) -> None:
    """What was in flight is dropped with its pins, and the next batches find room."""
    assert two_ranks.run(_left_by_failure, name, forward, place, lines) == [[], []]


def _left_by_overflow(serially: bool) -> list[str]:
    pipeline, _, groups = _made(EXACT[2], 2)
    run = pipeline.pipe.run_serial if serially else pipeline.pipe.run
    with pipeline, pytest.raises(CacheOverflow, match="keys are outstanding"):
        run(batches(4))
    return left_behind(groups)


@pytest.mark.parametrize("serially", [True, False], ids=["serial", "pipelined"])
def test_a_prefetch_that_fails_leaves_no_count_behind(two_ranks: Ranks, serially: bool) -> None:
    """It has counted its keys, but made no state from which a look-up could subtract."""
    assert two_ranks.run(_left_by_overflow, serially) == [[], []]


def _left_by_end() -> list[str]:
    pipeline, _, groups = _made(SPLIT)
    with pipeline:
        pipeline.progress(batches(8))
        assert left_behind(groups)
    return left_behind(groups)


def test_a_pipeline_that_ends_leaves_no_prefetch_behind(two_ranks: Ranks) -> None:
    """Its batches are dropped."""
    assert two_ranks.run(_left_by_end) == [[], []]


def _with_foreign_states() -> None:
    pipeline, _, groups = _made(EXACT[2])
    groups[0].prefetch(torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1]))
    with pipeline:
        pipeline.progress(batches(4))


def test_another_pipelines_prefetches_are_refused(two_ranks: Ranks) -> None:
    """They would be looked up instead of this pipeline's batches."""
    with pytest.raises(RuntimeError, match=r"tables\.0'.* holds 1 prefetched batches of another"):
        two_ranks.run(_with_foreign_states)


def _alone() -> tuple[DynamicTables, PrefetchedBatches]:
    group = DynamicTables(1, 8, rate=0.1)
    return group, PrefetchedBatches.of({"tables": nn.ModuleList([group])})


def test_a_prefetch_that_outlives_its_run_is_released() -> None:
    """A thread may still be inside when the others are dropped; the next batch is right."""
    group, prefetched = _alone()
    with prefetched.prefetching():
        prefetched.drop()
        group.prefetch(torch.tensor([1, 2]), torch.tensor([0, 2]))
    assert left_behind([group]) == []


def test_a_look_up_that_outlives_its_run_is_released() -> None:
    """This also includes what it has prefetched itself."""
    group, prefetched = _alone()
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    with prefetched.prefetching():
        pass
    with prefetched.looking_up():
        prefetched.drop()
        group(ids, offsets)
    assert left_behind([group]) == []


class CountedTable(nn.Module):
    """A table that notes the counters of its prefetch."""

    def __init__(self) -> None:
        super().__init__()
        self._prefetch_states: deque[Any] = deque()
        self.counters: Tensor | None = None

    def prefetch(
        self, indices: Tensor, offsets: Tensor, frequency_counters: Tensor | None = None
    ) -> None:
        self.counters = frequency_counters


def test_keys_are_counted_by_the_weights_that_lie_beside_them() -> None:
    """A prefetch may get a part of the ids; without weights, nothing is counted."""
    table = CountedTable()
    found = PrefetchedBatches.of({"tables": table})
    assert found is not None
    values, counts, lengths = torch.arange(5), torch.arange(10.0, 15.0), torch.tensor([2, 3])
    with found.counting([JaggedTensor(values, counts, lengths)]):
        table.prefetch(values[2:4], lengths)
        assert torch.equal(table.counters, counts[2:4])
        table.prefetch(values.clone(), lengths)
        assert table.counters is None
    with found.counting([JaggedTensor(values, lengths=lengths)]):
        table.prefetch(values[2:4], lengths)
        assert table.counters is None


def test_an_unknown_dynamicemb_is_refused() -> None:
    """If its queue had another name, it could not be balanced."""
    group, _ = _alone()
    unknown = type("TablesV9", (nn.Module,), {"prefetch": None, "__module__": "dynamicemb.tables"})
    unknown.prefetch = DynamicTables.prefetch
    with pytest.raises(RewriteError, match="'tables' has a TablesV9 of dynamicemb without"):
        PrefetchedBatches.of({"tables": nn.ModuleList([group, unknown()])})


# --------------------------------------------------------------------------- profiles


MEASURED = (PREFETCH, EMBED, "DenseForward", "EmbBackward")


def _profiled() -> tuple[set[str], list[str]]:
    """Return the measured tasks, and the differences of the state after a profile."""
    model, groups = dynamic(JOB, 100)
    with create(SPLIT, model, JOB, tables_state=saving(groups)) as pipeline:
        to_the_end(pipeline, batches(3))
        before = Outcome([], everything(model) | rows_of(groups))
        (batch,) = batches(1, seed=1)
        result = TaskProfiler(pipeline.pipe).profile(batch, 1, 1, 2, False, MEASURED)
        after = Outcome([], everything(model) | rows_of(groups))
        to_the_end(pipeline, batches(3))
    return set(result.exposed_s), after.differences(before) + left_behind(groups)


def test_the_profiler_measures_with_a_cache(two_ranks: Ranks) -> None:
    """No shortcut fills the cache; afterwards every row is as before."""
    assert two_ranks.run(_profiled) == [({*MEASURED}, [])] * 2


def _recorded(given: bool) -> list[str]:
    model, groups = dynamic(JOB, 200)
    owner = _tasks(model, "split", **({"tables_state": saving(groups)} if given else {}))
    before = Outcome([], everything(model) | rows_of(groups))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be restored")
        record(owner.tasks(), next(batches(1)), device=CPU)
    return Outcome([], everything(model) | rows_of(groups)).differences(before)


def test_rows_that_cannot_be_restored_are_refused(one_rank: Ranks) -> None:
    """The error has the module's name and the argument that restores them."""
    refused = r"tables\.0 \(ShardedEmbeddingCollection\).*tables_state=\(capture, restore\)"
    with pytest.raises(RuntimeError, match=refused):
        one_rank.run(_recorded, False)
    assert one_rank.run(_recorded, True) == [[]]

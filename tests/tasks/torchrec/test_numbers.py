"""The numbers are those of TorchRec's own classes, bit for bit, for all ways of calling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from swpipe.loops import EvenData
from swpipe.tasks import torchrec as ours
from tests.support.ranks import Ranks
from tests.tasks.torchrec.loops import (
    made,
    several,
    streams_on_a_cpu,
    theirs,
    trained,
)
from tests.tasks.torchrec.models import batches
from tests.tasks.torchrec.trial import to_the_end

SPARSE_EVAL = "EvalPipelineSparseDist"
SPARSE, BASE = "TrainPipelineSparseDist", "TrainPipelineBase"


def _evaluated_ahead() -> list[str]:
    wanted = trained(theirs(SPARSE_EVAL), 5)
    options = {"enable_embedding_lookup_prefetch": True}
    return trained(ours.EvalPipelineFusedSparseDist, 5, **options).differences(wanted)


def test_evaluations_that_look_up_ahead_are_torchrecs(two_ranks: Ranks) -> None:
    """test_rates has the trainings of each class, test_turns those with others on their model."""
    assert two_ranks.run(_evaluated_ahead) == [[], []]


PULLED = {
    BASE: 2,
    SPARSE: 3,
    "TrainPipelineFusedSparseDist": 3,
    "TrainPipelineSemiSync": 4,
}


def _pulled() -> list[dict[str, int]]:
    """Return how many batches the first call pulls, in TorchRec's classes and in ours."""
    found: list[dict[str, int]] = [{}, {}]
    for name, (which, kind) in product(PULLED, enumerate((theirs, partial(getattr, ours)))):
        left = list(batches(9))
        with streams_on_a_cpu() if which == 0 else nullcontext():
            made(kind(name)).progress(popped(left))
        found[which][name] = 9 - len(left)
    return found


def popped(batches_: list[Any]) -> Iterator[Any]:
    """Yield the batches of a list, and remove them."""
    while batches_:
        yield batches_.pop(0)


def test_as_many_batches_are_pulled_as_by_torchrec(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Several ranks pull one more, which stays on the host, to agree on the end of the data."""
    assert one_rank.run(_pulled) == [[PULLED, PULLED]]
    more = {name: count + 1 for name, count in PULLED.items()}
    assert two_ranks.run(_pulled) == [[PULLED, more]] * 2


def _collectives_in_a_step() -> dict[str, int]:
    counts = {}
    for name in (SPARSE, "TrainPipelineFusedSparseDist"):
        pipeline, data = made(getattr(ours, name)), batches(12)
        pipeline.progress(data)
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
            mock.patch.object(EvenData, "exchange_status", side_effect=AssertionError) as asked,
        ):
            pipeline.progress(data)
        counts[name] = reduced.call_count + asked.call_count
    return counts


def test_one_rank_agrees_with_nobody(one_rank: Ranks) -> None:
    """It compares neither the end of the data, nor has a hook of DDP's in Python."""
    assert set(one_rank.run(_collectives_in_a_step)[0].values()) == {0}


def _cut() -> list[Any]:
    names = (SPARSE, "PrefetchTrainPipelineSparseDist", "TrainPipelineFusedSparseDist")
    found = []
    for name, count in ((SPARSE, 0), (SPARSE, 1), *((name, 4) for name in names)):
        wanted = trained(theirs(SPARSE), count, execute_all_batches=False)
        got = trained(getattr(ours, name), count, execute_all_batches=False)
        if where := got.differences(wanted):
            found.append((name, count, where))
    return found


def test_the_last_batches_are_dropped_on_demand(two_ranks: Ranks) -> None:
    """``execute_all_batches=False`` drops as many as TorchRec's does."""
    assert two_ranks.run(_cut) == [[], []]


def _one_by_one(pipeline: Any) -> list[torch.Tensor]:
    return [pipeline.progress(iter([batch])) for batch in batches(4)]


def _epochs(pipeline: Any) -> list[torch.Tensor]:
    outputs = []
    for data in several(3, 1, 2):
        outputs += to_the_end(pipeline, data)
        pipeline.reset()
    return outputs


def _ended_by_none(pipeline: Any) -> list[torch.Tensor]:
    return to_the_end(pipeline, chain(batches(3), [None], batches(2)))


LOOPS = (_one_by_one, _epochs, _ended_by_none)


def _iterators() -> list[Any]:
    found = []
    for loop in LOOPS:
        wanted = trained(theirs(SPARSE), loop)
        for kind in (ours.TrainPipelineSparseDist, ours.TrainPipelineFusedSparseDist):
            found += [(loop, kind, one) for one in trained(kind, loop).differences(wanted)]
    return found


def test_iterators_are_taken_as_by_torchrec(two_ranks: Ranks) -> None:
    """There is one for each batch, one after another with reset(), and one that None ends."""
    assert two_ranks.run(_iterators) == [[], []]


def _by_turns(name: str) -> tuple[list[int], bool]:
    """Return the source of each batch, and whether batches were trained on in that order."""
    taken: list[int] = []

    def told(k: int, data: Any) -> Any:
        for batch in data:
            taken.append(k)
            yield batch

    pipeline = made(getattr(ours, name))
    first, second = (told(k, data) for k, data in enumerate(several(8, 4)))
    outputs = [pipeline.progress(data) for data in (first, first, second, second, first)]
    for data in (second, first):
        outputs += to_the_end(pipeline, data)
    order = list(several(8, 4))
    plain = to_the_end(made(theirs(BASE)), iter([next(order[k]) for k in taken]))
    return taken, len(outputs) == 12 and all(map(torch.equal, outputs, plain))


def test_no_batch_is_lost_between_two_iterators(two_ranks: Ranks) -> None:
    """Batches in flight are finished before the other iterator begins."""
    for taken, equal in two_ranks.run(_by_turns, "PrefetchTrainPipelineSparseDist"):
        assert taken != sorted(taken)
        assert equal

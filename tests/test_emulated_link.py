"""The emulated link: late handles, free cores, and no exchange of TorchRec's that goes past it."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.bench.emulated_link import EmulatedLink
from tests.ranks import Ranks

L_MS = 40.0


def _exchange(async_op: bool) -> tuple[torch.Tensor, dist.Work | None]:
    rank = dist.get_rank()
    received = torch.zeros(2)
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    return received, dist.all_to_all_single(received, sent, async_op=async_op)


def _late() -> dict[str, object]:
    with EmulatedLink(L_MS) as link:
        dist.barrier()
        begin_s, busy_s = time.perf_counter(), time.process_time()
        received, work = _exchange(async_op=True)
        early = work.is_completed()
        issue_ms = (time.perf_counter() - begin_s) * 1e3
        work.wait()
        waited_ms = (time.perf_counter() - begin_s) * 1e3
        busy_ms = (time.process_time() - busy_s) * 1e3
        begin_s = time.perf_counter()
        work.wait()
        return {
            "work": isinstance(work, dist.Work),
            "early": early,
            "issue_ms": issue_ms,
            "waited_ms": waited_ms,
            "busy_ms": busy_ms,
            "again_ms": (time.perf_counter() - begin_s) * 1e3,
            "completed": work.is_completed(),
            "received": received.tolist(),
            "issued": dict(link.issued),
        }


def test_a_handle_completes_no_sooner_than_it_should(two_ranks: Ranks) -> None:
    """It is a Work, issued at once, waited for once, with what the other rank sent."""
    for rank, found in enumerate(two_ranks.run(_late)):
        assert found["work"]
        assert not found["early"]
        assert found["issue_ms"] < L_MS <= found["waited_ms"]
        assert found["again_ms"] < L_MS / 2
        assert found["completed"]
        assert found["received"] == [float(rank), 10.0 + rank]
        assert found["issued"] == {"all_to_all_single": 1}


def test_to_wait_keeps_no_core_busy(two_ranks: Ranks) -> None:
    """It sleeps."""
    assert all(found["busy_ms"] < L_MS / 2 for found in two_ranks.run(_late))


def _beside() -> int:
    """What another thread counts while this one waits."""
    counted, stop = 0, threading.Event()
    begun = threading.Event()

    def count() -> None:
        nonlocal counted
        begun.set()
        while not stop.is_set():
            counted += 1

    with EmulatedLink(L_MS):
        _, work = _exchange(async_op=True)
        thread = threading.Thread(target=count)
        thread.start()
        begun.wait()
        before = counted
        work.wait()
        found = counted - before
        stop.set()
        thread.join()
    return found


def test_to_wait_leaves_the_interpreter_to_others(two_ranks: Ranks) -> None:
    """A thread that counts gets far."""
    assert all(count > 1000 for count in two_ranks.run(_beside))


def _blocking() -> tuple[bool, float, list[float]]:
    with EmulatedLink(L_MS):
        begin_s = time.perf_counter()
        received, work = _exchange(async_op=False)
    return work is None, (time.perf_counter() - begin_s) * 1e3, received.tolist()


def test_a_call_without_a_handle_is_late_itself(two_ranks: Ranks) -> None:
    """It returns what it would have, later."""
    for rank, (nothing, took_ms, received) in enumerate(two_ranks.run(_blocking)):
        assert nothing
        assert took_ms >= L_MS
        assert received == [float(rank), 10.0 + rank]


def _futures() -> None:
    with EmulatedLink():
        _, work = _exchange(async_op=True)
        work.wait()
        work.get_future()


def test_a_future_is_refused(two_ranks: Ranks) -> None:
    """It would complete on time."""
    with pytest.raises(NotImplementedError, match="wait"):
        two_ranks.run(_futures)


def test_the_functions_come_back() -> None:
    """Outside the block nothing is wrapped."""
    before = dist.all_to_all_single
    with EmulatedLink():
        assert dist.all_to_all_single is not before
    assert dist.all_to_all_single is before


def _seen(steps: int) -> tuple[Counter[str], Counter[str]]:
    """Collectives of some steps by TorchRec, as torch's profiler and the link count them."""
    from torch.profiler import ProfilerActivity, profile

    from tests.bench.contenders import CONTENDERS
    from tests.bench.dlrm import TINY, dense_optimizer, endless, sharded_dlrm

    found: Counter[str] = Counter()
    with EmulatedLink() as link:
        for contender in CONTENDERS:
            model = sharded_dlrm(TINY)
            pipeline = contender.make(model, dense_optimizer(model))
            data = endless(TINY)
            for _ in range(6):
                pipeline.progress(data)
            before = link.issued.copy()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                for _ in range(steps):
                    pipeline.progress(data)
            calls = Counter(e.name for e in seen.events() if e.name.startswith("c10d::"))
            ours = link.issued - before
            if ours["all_to_all_single"] != calls["c10d::alltoall_base_"]:
                found[contender.name] += 1
    return found, calls


@pytest.mark.filterwarnings("ignore")
def test_every_exchange_of_every_contender_is_late(two_ranks: Ranks) -> None:
    """All-to-alls that torch sees are those of the link; DDP's reductions alone go past it."""
    for past_the_link, calls in two_ranks.run(_seen, 3):
        assert not past_the_link
        assert calls.keys() == {"c10d::alltoall_base_", "c10d::allreduce_"}
        assert calls["c10d::alltoall_base_"] == 5 * 3

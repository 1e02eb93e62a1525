"""A feed with threads as workers, killed and delayed at random, and with real processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import swpipe
from swpipe.loops import Feed, FeedWorker, StoreWorker, serve_store, worker_processes
from tests.support.budget import seeds


class Stage:
    """A scheduler that holds all questions of in-process workers, and releases them at random.

    A slow question is released when no other has arrived for a moment; time affects the order only.
    """

    def __init__(self, seed: int, workers: int, kills: float) -> None:
        self._draw, self._kills = random.Random(seed), kills
        self._alive, self._closed = workers, False
        self._changed = threading.Condition()
        self._held: dict[threading.Event, float] = {}
        self._killed: set[threading.Event] = set()
        self.workers = [StagedWorker(self) for _ in range(workers)]
        self._thread = threading.Thread(target=self._direct)
        self._thread.start()

    def hold(self) -> None:
        """Wait for this question's turn; raise an error if its worker is killed."""
        turn = threading.Event()
        with self._changed:
            self._held[turn] = self._draw.random()
            self._changed.notify()
        turn.wait()
        if turn in self._killed:
            raise ConnectionError("killed")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _direct(self) -> None:
        with self._changed:
            while not self._closed or self._held:
                if not self._held:
                    self._changed.wait()
                    continue
                fast = [turn for turn, weight in self._held.items() if weight < 0.8]
                if not fast and not self._closed and self._changed.wait(0.0005):
                    continue
                turn = self._draw.choice(fast or [*self._held])
                del self._held[turn]
                if self._alive > 1 and self._draw.random() < self._kills:
                    self._alive -= 1
                    self._killed.add(turn)
                turn.set()


class StagedWorker(FeedWorker):
    def __init__(self, stage: Stage) -> None:
        super().__init__(lambda policy, request: (policy, request))
        self._stage = stage

    def __call__(self, question: bytes) -> bytes:
        answer = super().__call__(question)
        self._stage.hold()
        return answer

    def close(self) -> None:
        self._stage.close()


def staged_run(seed: int, kills: float = 0.1, **options: Any) -> tuple[Feed, list[Any]]:
    """Run a feed whose policy is the number of updates; return (updates, value) per sample."""
    trained, updates = [], 0
    stage = Stage(seed, random.Random(seed).randint(1, 5), kills)
    samples = options.pop("samples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with swpipe.feed(range(samples), stage.workers, policy=lambda: updates, **options) as feed:
            for batch in feed:
                trained += [(updates, value) for value in batch.values]
                updates += 1
    return feed, trained


def test_staleness_is_never_above_the_bound_whoever_dies() -> None:
    """It is counted from outside, by the policy that made each sample; each request comes once."""
    for seed in seeds("feeds", 60):
        draw = random.Random(seed)
        samples, staleness, batch = draw.randint(0, 30), draw.randint(0, 4), draw.randint(1, 5)
        options = {"samples": samples, "staleness": staleness, "batch": batch}
        order = draw.choice(("asked", "completed", "completed"))
        feed, trained = staged_run(seed, order=order, **options)
        ages = [updates - policy for updates, (policy, _) in trained]
        assert all(0 <= age <= staleness for age in ages)
        assert sorted(request for _, (_, request) in trained) == [*range(samples)]
        _, again = staged_run(seed + 1, replay=feed.arrivals, **options)
        assert again == trained


def test_a_worker_that_dies_is_named() -> None:
    """A warning and ``lost`` name it; another worker makes its sample."""
    died = threading.Event()

    def dies(question: bytes) -> bytes:
        died.set()
        raise ConnectionError("no route")

    def waits(policy: Any, request: int) -> int:
        died.wait()
        return request

    workers = [FeedWorker(waits), dies]
    with swpipe.feed(range(4), workers, policy=int, batch=2, timeout_s=30) as feed:
        with pytest.warns(RuntimeWarning, match="worker 1 is gone, another worker is asked again"):
            values = [value for batch in feed for value in batch.values]
    assert values == [0, 1, 2, 3]
    assert list(feed.lost) == ["worker 1"]
    assert feed.lost["worker 1"].endswith(": no route")


def _dies(question: bytes) -> bytes:
    raise ConnectionError("no route")


def test_a_feed_without_workers_left_raises() -> None:
    """The error says with which samples they died."""
    with swpipe.feed(range(4), [_dies], policy=int, batch=2) as feed:
        with pytest.raises(
            RuntimeError, match="all workers have ended: .'worker 0': 'sample 0: no r"
        ):
            next(feed)
        with pytest.raises(StopIteration):
            next(feed)


def test_silence_raises_and_names_who_was_asked() -> None:
    """This happens after ``timeout_s``."""
    silent = threading.Event()

    def hangs(question: bytes) -> bytes:
        silent.wait()
        raise ConnectionError

    with swpipe.feed(range(4), [hangs], policy=int, batch=2, timeout_s=0.05) as feed:
        with pytest.raises(
            RuntimeError,
            match="within 0.05 s. Workers that were asked: worker 0 for sam",
        ):
            next(feed)
    silent.set()


def test_a_feed_that_another_thread_closes_ends_the_next_that_waits() -> None:
    """As after its last batch."""
    asked, closed = threading.Event(), threading.Event()

    class Hangs:
        def __call__(self, question: bytes) -> bytes:
            asked.set()
            closed.wait()
            raise ConnectionError

        def close(self) -> None:
            closed.set()

    def close() -> None:
        asked.wait()
        feed.close()

    with swpipe.feed(range(4), [Hangs()], policy=int, batch=2) as feed:
        thread = threading.Thread(target=close)
        thread.start()
        assert [*feed] == []
        thread.join()
    assert feed.lost == {}


def fails(policy: Any, request: int) -> Any:
    if request == 3:
        raise KeyError("no such prompt")
    return request


def refused(policy: Any, request: int) -> Any:
    raise ConnectionError("the reward model is not there")


def unsendable(policy: Any, request: int) -> Any:
    return threading.Lock()


@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (fails, KeyError, "no such prompt"),
        (refused, ConnectionError, "the reward model is not there"),
        (unsendable, TypeError, "a sample of type lock cannot be sent: .*return what can be pickl"),
    ],
)
def test_an_error_of_a_worker_is_raised_in_the_loop(work: Any, kind: Any, text: str) -> None:
    """It keeps its type, and a note says which worker and sample."""
    with swpipe.feed(range(9), [FeedWorker(work)], policy=int, batch=3) as feed:
        with pytest.raises(kind, match=text) as raised:
            list(feed)
    trace, where = raised.value.__notes__
    assert work.__name__ in trace or "cannot be sent" in trace
    assert where.startswith("in worker 0, for sample ")


def test_another_error_of_the_connection_is_no_death() -> None:
    """It is raised in the loop."""

    def asks(question: bytes) -> bytes:
        raise ValueError("the address is wrong")

    with swpipe.feed(range(9), [asks], policy=int, batch=3) as feed:
        with pytest.raises(ValueError, match="the address is wrong"):
            list(feed)
    assert feed.lost == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staleness": -1}, "staleness is -1: give 0 for on-policy samples"),
        ({"batch": 0}, "batch is 0"),
        ({"order": "sorted"}, "order is 'sorted'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        (
            {"replay": [(0, 1)]},
            "replay has sample 0 of version 1 in batch 0, not recorded with batch=2",
        ),
        ({"replay": [(0, 0), (0, 0)]}, "replay has a sample twice"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], text: str) -> None:
    """Each message says what to give."""
    with pytest.raises(ValueError, match=text):
        swpipe.feed(range(4), [_dies], **{"policy": int, "batch": 2, **options})


def test_workers_that_are_no_functions_are_refused() -> None:
    """An empty list, and two workers with the same name, are refused, too."""
    for workers in ([], [3]):
        with pytest.raises(TypeError, match="give a list, such as worker_processes"):
            swpipe.feed(range(4), workers, policy=int, batch=2)  # type: ignore[arg-type]

    worker = StoreWorker(torch.distributed.HashStore(), "rollout")
    with pytest.raises(ValueError, match="two workers have the same name: rollout, rollout"):
        swpipe.feed(range(4), [worker, worker], policy=int, batch=2)


def test_a_replay_needs_its_requests() -> None:
    """Too few requests are an error, not a shorter run."""
    worker = FeedWorker(fails)
    with swpipe.feed(range(2), [worker], policy=int, batch=2, replay=[(0, 0), (2, 0)]) as feed:
        with pytest.raises(ValueError, match="replay has sample 2, of 2 requests"):
            next(feed)


# ------------------------------------------------------------------------------- real processes


def rollout(policy: dict[str, Tensor], request: int) -> tuple[Tensor, Tensor]:
    """Sample actions of a linear policy; the noise depends on the request only."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(request)
    states = torch.randn(4, 3, generator=generator)
    return states, states @ policy["weight"].T


def train(order: Any, replay: Any = None, kill: bool = False) -> tuple[Feed, Tensor]:
    """Train a linear policy by eight updates; a worker is killed after the second."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = worker_processes(rollout, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with swpipe.feed(
            range(16),
            workers,
            policy=model.state_dict,
            batch=2,
            staleness=2,
            order=order,
            replay=replay,
        ) as feed:
            for batch in feed:
                assert batch.staleness <= 2
                if kill and batch.version == 1 and workers[0].process.pid is not None:
                    os.kill(workers[0].process.pid, signal.SIGKILL)
                for states, actions in batch.values:
                    ((model(states) - actions - 1) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return feed, model.weight.detach()


def reference() -> Tensor:
    """Return the policy after the same updates in one process, with policies two versions old."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    versions = []
    for update in range(8):
        versions.append({"weight": model.weight.detach().clone()})
        for request in range(2 * update, 2 * update + 2):
            states, actions = rollout(versions[max(0, update - 2)], request)
            ((model(states) - actions - 1) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.slow
def test_processes_give_the_bits_of_one_process_also_when_one_is_killed() -> None:
    """Samples come in the order of requests; the killed process is named."""
    feed, weight = train("asked", kill=True)
    assert torch.equal(weight, reference())
    assert list(feed.lost) in (["process 0"], [])


@pytest.mark.slow
def test_a_replay_of_processes_has_the_same_bits() -> None:
    """A run in completion order is replayed by other processes."""
    feed, weight = train("completed", kill=True)
    again, replayed = train("completed", replay=feed.arrivals)
    assert again.arrivals == feed.arrivals
    assert torch.equal(weight, replayed)


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    """No process is started."""
    with pytest.raises(TypeError, match="define it at the top level of a module"):
        worker_processes(lambda policy, request: request, 2)
    with pytest.raises(ValueError, match="count is 0"):
        worker_processes(rollout, 0)


@pytest.fixture
def store() -> torch.distributed.Store:
    """A store of this process."""
    return torch.distributed.HashStore()


def test_workers_of_a_store_give_the_same_samples(store: torch.distributed.Store) -> None:
    """One worker answers; one that never starts is lost after its time."""
    lost = threading.Event()

    class Watched(StoreWorker):
        def __call__(self, question: bytes) -> bytes:
            try:
                return super().__call__(question)
            finally:
                lost.set()

    def waits(policy: dict[str, Tensor], request: int) -> tuple[Tensor, Tensor]:
        lost.wait()
        return rollout(policy, request)

    serving = threading.Thread(target=serve_store, args=(store, "rollout 0", waits))
    serving.start()
    workers = [StoreWorker(store, "rollout 0"), Watched(store, "rollout 1", lost_after_s=0.05)]
    policy = {"weight": torch.ones(2, 3)}
    options: dict[str, Any] = {"policy": lambda: policy, "batch": 3, "timeout_s": 30}
    with swpipe.feed(range(3), workers, **options) as feed:
        with pytest.warns(RuntimeWarning, match="rollout 1 is gone, .* no sign of life"):
            (batch,) = feed
    serving.join()
    for request, (states, actions) in enumerate(batch.values):
        expected = rollout(policy, request)
        assert torch.equal(states, expected[0])
        assert torch.equal(actions, expected[1])

"""Batches of samples that worker processes make with a policy of bounded staleness.

The trainer's process has one thread for each worker. The thread asks its worker for one sample,
waits for the answer and asks for the next sample. A worker never has more than one open request,
so that sending a request never waits for receiving an answer::

    caller's thread    next(): publish version k ─ hand out batch k       body: train     next() ...
                                     │                  ^
    thread of worker 0       ask ─ (policy k) ─ wait ─ arrive ─ ask ─ wait ────────── arrive
    thread of worker 1       ask ─ wait ─── the worker is gone: the sample is asked for again

Guarantees: ``FeedPace`` decides under one lock which sample is asked for and which is handed out.
``next()`` pickles the policy, so that later changes by the loop's body do not reach the workers.
Requests are pulled on the caller's thread.

Assumes: the result of the worker's function depends on the policy and the request only. A replay
then returns equal samples.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from swpipe.core.messages import shown
from swpipe.loops.feed_pace import Arrival, FeedPace


class Sample(NamedTuple):
    """A sample, with its request, its policy version and its worker.

    Attributes:
        number: The index of the sample's request, from 0.
        version: The version of the policy that made the sample, from 0.
        worker: The name of the worker that made the sample.
        value: What the worker's function returned.
    """

    number: int
    version: int
    worker: str
    value: Any


class FeedBatch(NamedTuple):
    """The samples for one update of the policy; ``version`` counts the updates before this one."""

    version: int
    samples: tuple[Sample, ...]

    @property
    def values(self) -> list[Any]:
        """The samples' values."""
        return [sample.value for sample in self.samples]

    @property
    def staleness(self) -> int:
        """The number of versions by which the policy of the oldest sample is behind."""
        return max(self.version - sample.version for sample in self.samples)


class FeedWorker:
    """A callable that answers each request of a feed by ``work(policy, request)``."""

    def __init__(self, work: Callable[[Any, Any], Any]) -> None:
        self._work = work
        self._policy = None

    def __call__(self, question: bytes) -> bytes:
        """Return the pickled answer to one pickled question: a flag and the sample or the error."""
        policy, request = pickle.loads(question)
        # The trainer sends the policy only if this worker does not have its version yet.
        if policy is not None:
            self._policy = pickle.loads(policy)
        try:
            value = self._work(self._policy, request)
            # A value that cannot be pickled is an error of the function, not of the connection.
            try:
                return pickle.dumps((True, value))
            except Exception as error:
                raise TypeError(
                    f"a sample of type {type(value).__name__} cannot be sent: {error}; return what "
                    "can be pickled"
                ) from error
        except Exception as error:  # noqa: BLE001, it is raised in the trainer
            error.add_note(f"In the worker:\n{traceback.format_exc()}")
            return pickle.dumps((False, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    # Some exceptions can be pickled but not loaded, for example if __init__ takes other arguments.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001, a class of the user's may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Feed(Iterator[FeedBatch]):
    """An iterator over batches of samples from workers; made by ``feed``.

    Attributes:
        arrivals: The samples handed out so far, in order, as pairs (number, version) for
            ``replay=``.
        lost: A mapping from the name of each lost worker to the sample that it was asked for and
            the reason of the loss.
    """

    def __init__(
        self,
        requests: Iterable[Any],
        workers: Mapping[str, Callable[[bytes], bytes]],
        policy: Callable[[], Any],
        pace: FeedPace,
        timeout_s: float,
    ) -> None:
        self.arrivals = pace.arrivals
        self.lost: dict[str, str] = {}
        self._source = enumerate(requests)
        self._policy = policy
        self._pace = pace
        self._timeout_s = timeout_s
        self._requests: dict[int, Any] = {}  # sample to request, until it is handed out
        self._values: dict[int, tuple[str, Any]] = {}  # of the samples that have arrived
        # Pickled policies by version, limited to the versions that the staleness still allows.
        self._policies: dict[int, bytes] = {}
        self._asked: dict[str, int] = {}  # worker to the sample that it is making
        self._warned = 0
        # Why no sample is asked for any more: what a worker has raised, or StopIteration once the
        # feed is closed. None until then.
        self._end: BaseException | None = None
        # This lock protects the pace and all dictionaries above. No thread holds it while it waits
        # for a worker.
        self._changed = threading.Condition()
        self._workers = {
            threading.Thread(
                target=self._ask, args=(name, worker), name=f"feed {name}", daemon=True
            ): worker
            for name, worker in workers.items()
        }

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and close the workers that have a ``close``; may be called twice."""
        with self._changed:
            self._end = StopIteration()
            self._changed.notify_all()
        for thread, worker in self._workers.items():
            close = getattr(worker, "close", None)
            if close is not None:  # without it nothing interrupts a request, and join() could hang
                close()
                if thread.ident is not None:
                    thread.join()

    def __next__(self) -> FeedBatch:
        try:
            samples = () if isinstance(self._end, StopIteration) else self._next_samples()
            if not samples:
                raise StopIteration
        except BaseException:
            self.close()
            raise
        return FeedBatch(self._pace.version, samples)

    def _next_samples(self) -> tuple[Sample, ...]:
        pace = self._pace
        # Pickle before taking the lock: a large policy must not delay answers that arrive.
        published = pickle.dumps(self._policy())
        # Only this thread writes to _requests outside the lock, and only for numbers that no worker
        # thread may ask for before publish() below.
        more = dict(islice(self._source, pace.needed() - pace.requests))
        self._requests.update(more)
        samples: list[Sample] = []
        with self._changed:
            pace.publish(pace.requests + len(more))
            self._policies[pace.version] = published
            self._policies.pop(pace.version - pace.staleness - 1, None)
            self._changed.notify_all()
            # The threads start with the first batch: a feed that is never iterated needs none.
            for thread in self._workers:
                if thread.ident is None:
                    thread.start()
            while len(samples) < pace.batch and not pace.done:
                arrival = pace.take(self._values)
                if arrival is None:
                    self._wait()
                    continue
                worker, value = self._values.pop(arrival.number)
                del self._requests[arrival.number]
                samples.append(Sample(*arrival, worker, value))
            self._warn_of_lost()
        return (*samples,)

    def _wait(self) -> None:
        """Wait until a thread reports a change; raise the error that a worker has raised."""
        if self._end is not None:
            raise self._end
        if len(self.lost) == len(self._workers):
            raise RuntimeError(
                f"all workers have ended: {self.lost}. No worker is left to make these samples: "
                "start the feed again with new workers"
            )
        self._warn_of_lost()
        if not self._changed.wait(self._timeout_s):
            asked = ", ".join(f"{name} for sample {i}" for name, i in self._asked.items())
            raise RuntimeError(
                f"no sample came within {self._timeout_s} s. Workers that were asked: "
                f"{asked or 'none'}. If a sample may take longer, give a larger timeout_s"
            )

    def _warn_of_lost(self) -> None:
        for name in [*self.lost][self._warned :]:
            self._warned += 1
            text = f"{name} is gone, another worker is asked again for {self.lost[name]}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _ask(self, name: str, worker: Callable[[bytes], bytes]) -> None:
        """Ask one worker for samples, one after another, until the feed is closed."""
        held = None  # the policy version that the worker has
        while (question := self._next_question(name)) is not None:
            arrival, policy, request = question
            is_lost = False
            try:
                message = pickle.dumps((None if held == arrival.version else policy, request))
                made, value = pickle.loads(worker(message))
                error = None if made else value
            except BaseException as caught:  # noqa: BLE001, it is raised in the caller's thread
                # Only errors of the connection mean that the worker is lost. An error of the
                # worker's function arrives as an answer.
                is_lost = isinstance(caught, ConnectionError | EOFError)
                error = caught
            with self._changed:
                del self._asked[name]
                if error is None:
                    self._values[arrival.number] = name, value
                # close() ends the workers, which then look lost as well.
                elif is_lost and self._end is None:
                    self.lost[name] = f"sample {arrival.number}: {error}"
                    self._pace.lose(arrival.number)
                elif self._end is None:
                    error.add_note(f"in {name}, for sample {arrival.number}: {shown(request)}")
                    self._end = error
                self._changed.notify_all()
            if error is not None:
                return
            held = arrival.version

    def _next_question(self, name: str) -> tuple[Arrival, bytes, Any] | None:
        with self._changed:
            while self._end is None:
                arrival = self._pace.ask()
                if arrival is not None:
                    self._asked[name] = arrival.number
                    policy = self._policies[arrival.version]
                    return arrival, policy, self._requests[arrival.number]
                self._changed.wait()
        return None


def feed(
    requests: Iterable[Any],
    workers: Sequence[Callable[[bytes], bytes]],
    *,
    policy: Callable[[], Any],
    batch: int,
    staleness: int = 0,
    order: Literal["asked", "completed"] = "asked",
    replay: Iterable[tuple[int, int]] | None = None,
    timeout_s: float = 600.0,
) -> Feed:
    """Iterate over batches of samples that workers make with a policy that the loop trains.

    ::

        workers = worker_processes(rollout, 4)
        with feed(prompts, workers, policy=model.state_dict, batch=8, staleness=1) as batches:
            for batch in batches:
                train(model, batch.values)

    Each step publishes the policy as the next version: batch k is trained by version k, and each
    of its samples was made with version k - staleness or a newer one. A RuntimeWarning names a
    worker that has gone; another one is asked for its sample.

    Args:
        requests: One for each sample. Can be pickled; pulled in ``next()``.
        workers: ``worker_processes``, ``StoreWorker``, or any functions that carry a question to a
            ``FeedWorker`` elsewhere and return its answer. A function raises ConnectionError if
            its worker has gone. A ``name`` and a ``close`` are used if there are any.
        policy: Returns what workers need of the policy, such as ``model.state_dict``. It is called
            and pickled in each ``next()``.
        batch: How many samples each update has; the last one may have fewer.
        staleness: How many versions a sample's policy may be behind at most; 0 for on-policy.
        order: "asked": samples come in the order of the requests, each made with the version
            ``staleness`` before its batch's: the same numbers in each run. "completed": as
            completed, as far as the bound allows, with the newest version.
        replay: ``arrivals`` of an earlier run: the same samples, versions and order again. Batch
            and staleness have to be those of that run.
        timeout_s: Raise if no worker answers for so long.

    Raises:
        ValueError: A number, the order or the replay is not as above.
        TypeError: ``workers`` are no functions, or there are none.
    """
    recorded = None if replay is None else [Arrival(*pair) for pair in replay]
    checks = (
        (batch < 1, f"batch is {batch}: give at least 1"),
        (staleness < 0, f"staleness is {staleness}: give 0 for on-policy samples, or more"),
        (order not in ("asked", "completed"), f"order is {order!r}: give 'asked' or 'completed'"),
        (not timeout_s > 0, f"timeout_s is {timeout_s}: give a number of seconds above 0"),
    )
    wrong = [text for is_wrong, text in checks if is_wrong]
    wrong = wrong or [*_misfits(recorded or (), batch, staleness)]
    if wrong:
        raise ValueError("; ".join(wrong))
    if not workers or not all(callable(each) for each in workers):
        raise TypeError(
            f"workers is {shown(workers)}: give a list, such as worker_processes(work, 4)"
        )
    names = [getattr(each, "name", f"worker {i}") for i, each in enumerate(workers)]
    named = dict(zip(names, workers, strict=True))
    if len(named) < len(names):
        raise ValueError(f"two workers have the same name: {', '.join(names)}")
    pace = FeedPace(batch, staleness, order == "completed", recorded)
    return Feed(requests, named, policy, pace, timeout_s)


def _misfits(replay: Sequence[Arrival], batch: int, staleness: int) -> Iterator[str]:
    for position, (number, version) in enumerate(replay):
        newest = position // batch
        if not max(0, newest - staleness) <= version <= newest:
            sample = f"sample {number} of version {version} in batch {newest}"
            yield f"replay has {sample}, not recorded with batch={batch}, staleness={staleness}"
            return
    if len({each.number for each in replay}) < len(replay):
        yield "replay has a sample twice: give the arrivals of one run"

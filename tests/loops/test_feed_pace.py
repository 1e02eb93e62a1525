"""The pace of a feed on a virtual clock: throughput with heavy tails, and limited staleness."""

from __future__ import annotations

import heapq
import random

from swpipe.loops.feed_pace import Arrival, FeedPace
from tests.support.budget import seeds

TRAIN_S = 0.5


class Simulation:
    """A simulation of workers with given ``durations``, and a trainer with TRAIN_S per batch."""

    def __init__(self, pace: FeedPace, batch: int, workers: int, durations: list[float]) -> None:
        self.pace, self.batch, self.durations = pace, batch, durations
        self.now, self.idle = 0.0, workers
        self.running: list[tuple[float, int]] = []
        self.arrived: list[int] = []

    def run(self) -> float:
        """Return the time at which all samples are trained."""
        while not self.pace.done:
            self.pace.publish(min(self.pace.needed(), len(self.durations)))
            self.ask()
            taken = 0
            while taken < self.batch and not self.pace.done:
                arrival = self.pace.take(self.arrived)
                if arrival is None:
                    self.finish()
                else:
                    self.arrived.remove(arrival.number)
                    taken += 1
            trained = self.now + TRAIN_S
            while self.running and self.running[0][0] <= trained:
                self.finish()
            self.now = trained
        return self.now

    def ask(self) -> None:
        while self.idle and (arrival := self.pace.ask()) is not None:
            self.idle -= 1
            end = self.now + self.durations[arrival.number]
            heapq.heappush(self.running, (end, arrival.number))

    def finish(self) -> None:
        self.now, index = heapq.heappop(self.running)
        self.idle += 1
        self.arrived.append(index)
        self.ask()


def heavy_tails(samples: int, seed: int) -> list[float]:
    """Return durations of mostly 1 to 2 s; one in a hundred is 50 s, where they are cut off."""
    draw = random.Random(seed)
    return [min(draw.paretovariate(1.1), 50.0) for _ in range(samples)]


def test_completion_order_is_three_times_as_fast_as_the_synchronous_loop() -> None:
    """Durations have heavy tails; 32 workers make batches of 16 with staleness 4."""
    for seed in range(2):
        durations = heavy_tails(640, seed)
        synchronous = Simulation(FeedPace(16, 0, False, None), 16, 32, durations).run()
        completed = Simulation(FeedPace(16, 4, True, None), 16, 32, durations).run()
        assert synchronous / completed >= 3.0


def test_a_sample_in_the_order_asked_has_the_version_of_its_position() -> None:
    """This holds for any durations."""
    pace = FeedPace(4, 2, False, None)
    Simulation(pace, 4, 5, heavy_tails(30, 0)).run()
    assert pace.arrivals == [Arrival(i, max(0, i // 4 - 2)) for i in range(30)]


def test_completion_order_hands_out_what_is_there() -> None:
    """A slow sample is overtaken as long as its version may still be trained on."""
    pace = FeedPace(1, 3, True, None)
    Simulation(pace, 1, 2, [100.0, *[1.0] * 9]).run()
    assert [each.number for each in pace.arrivals][:4] == [1, 2, 3, 0]


def random_walk(pace: FeedPace, batch: int, samples: int, draw: random.Random) -> None:
    """Answer, lose and take in random order; check that some action is always possible."""
    running: list[Arrival] = []
    arrived: list[int] = []
    while not pace.done:
        pace.publish(min(pace.needed(), samples))
        taken = 0
        while taken < batch and not pace.done:
            acts = ["ask", "take"] + ["answer"] * bool(running)
            act = draw.choice(acts)
            if act == "answer":
                arrival = running.pop(draw.randrange(len(running)))
                (pace.lose if draw.random() < 0.2 else arrived.append)(arrival.number)
            elif act == "ask" and (asked := pace.ask()) is not None:
                running.append(asked)
            elif act == "take" and (arrival := pace.take(arrived)) is not None:
                arrived.remove(arrival.number)
                taken += 1


def test_no_order_of_answers_and_losses_makes_a_sample_too_old() -> None:
    """Positions are counted in random runs; each sample comes once; the run never hangs."""
    for seed in seeds("paces", 300):
        draw = random.Random(seed)
        batch, staleness, samples = draw.randint(1, 5), draw.randint(0, 4), draw.randint(0, 40)
        pace = FeedPace(batch, staleness, draw.random() < 0.7, None)
        random_walk(pace, batch, samples, draw)
        ages = [p // batch - each.version for p, each in enumerate(pace.arrivals)]
        assert all(0 <= age <= staleness for age in ages)
        assert sorted(each.number for each in pace.arrivals) == [*range(samples)]
        again = FeedPace(batch, staleness, False, [*pace.arrivals])
        random_walk(again, batch, samples, draw)
        assert again.arrivals == pace.arrivals

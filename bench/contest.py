"""A model on each of two ranks: time all contenders in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.contenders import CONTENDERS, Contender, streams_on_a_cpu
from bench.dlrm import Batch, Size, dense_optimizer, endless, everything, sharded_dlrm
from bench.emulated_link import EmulatedLink, reduce_by_link
from bench.measure import sharpen_timers

MODELS: Mapping[str, Callable[[Size], nn.Module]] = {"DLRM": sharded_dlrm}

WARM_UP = 4
"""Untimed steps at the beginning of each turn."""


@dataclass
class Contest:
    """What was measured on one rank.

    Attributes:
        ms: Link latency in ms, then contender, to ms per step, one figure per round.
        differ: Contenders that should give TorchRec base's numbers and do not.
        per_step: Collectives per step that the link has seen, by function.
    """

    ms: dict[float, dict[str, list[float]]] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)
    per_step: dict[str, float] = field(default_factory=dict)


@dataclass
class Runner:
    """One contender with a model of its own."""

    contender: Contender
    pipeline: Any
    model: nn.Module
    data: Iterator[Batch]

    def ms(self, steps: int) -> float:
        """Per step."""
        for _ in range(WARM_UP):
            self.pipeline.progress(self.data)
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.pipeline.progress(self.data)
        return (time.perf_counter() - begin_s) / steps * 1e3

    def close(self) -> None:
        """Ours have threads to end."""
        if self.contender.ours:
            self.pipeline.close()


def contest(
    model: str,
    latencies: Sequence[float],
    rounds: int,
    steps: int,
    size: Size,
    names: Sequence[str] | None = None,
) -> Contest:
    """Time all contenders in turn on each link, and compare the parameters they trained."""
    sharpen_timers()
    found = Contest()
    chosen = [c for c in CONTENDERS if names is None or c.name in names]
    with streams_on_a_cpu(), EmulatedLink() as link:
        for latency in latencies:
            link.latency_ms = latency
            runners = [runner(c, MODELS[model](size), size, link) for c in chosen]
            ms = found.ms[latency] = {contender.name: [] for contender in chosen}
            for turn in range(rounds):
                for one in runners if turn % 2 == 0 else reversed(runners):
                    ms[one.contender.name].append(one.ms(steps))
            found.per_step = _per_step(runners[0], link)
            found.differ += _differ(runners)
    return found


def _per_step(one: Runner, link: EmulatedLink) -> dict[str, float]:
    before = link.issued.copy()
    one.ms(steps := 4)
    issued = link.issued - before
    return {name: count / (steps + WARM_UP) for name, count in issued.items()}


def _differ(runners: Sequence[Runner]) -> list[str]:
    """Close all; the exact ones whose parameters differ from the first one's."""
    for one in runners[1:]:  # train on the batches that only the first one has seen
        one.ms(4)
    wanted = everything(runners[0].model)
    found = []
    for one in runners:
        state = everything(one.model)
        same = all(torch.equal(wanted[name], state[name]) for name in wanted)
        if not same and not one.contender.stale:
            found.append(one.contender.name)
        one.close()
    return found


def runner(contender: Contender, trained: nn.Module, size: Size, link: EmulatedLink) -> Runner:
    """A contender that trains a model. Where the link is slow, so are its all-reduces."""
    if link.latency_ms and not contender.ours:  # ours all-reduces from Python by itself
        reduce_by_link(trained)
    pipeline = contender.make(trained, dense_optimizer(trained))
    return Runner(contender, pipeline, trained, endless(size))


def on_ranks(fn: Callable[..., Any], *args: Any, deadline_s: float = 1800.0) -> list[Any]:
    """Call a function on two ranks; return the result of each."""
    from tests.support.ranks import Ranks

    with Ranks(2, deadline_s=deadline_s) as ranks:
        return ranks.run(fn, *args)

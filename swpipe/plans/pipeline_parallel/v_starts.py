"""Orders of a V to start a search from: published, torch's, greedy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.greedy_order import GreedyOrder, GreedyRules
from swpipe.plans.pipeline_parallel.published_attempt import (
    AttemptResult,
    Sizes,
    best_attempt,
    try_twice,
)
from swpipe.plans.pipeline_parallel.torch_orders import torch_schedule
from swpipe.plans.pipeline_parallel.v_order import Order, VOrders

_RATIOS = (
    (1, 1.2, 0.8),
    (1, 0.8, 1.2),
    (1, 1, 1),
    (1, 1, 0.5),
    (1, 0.5, 1),
    (1, 1.5, 0.5),
    (1, 2, 1),
)
"""Times of F, B and W with which the published method is restarted."""

_HOPS = (0.001, 0.05, 0.4)
"""Latencies with which it is restarted, in units of F."""


def published_sizes(orders: VOrders) -> Sizes:
    """What the published method is told: it knows one time of each pass, here the mean."""
    n = orders.n_ranks
    pairs = [[cost[kind] + cost[kind + 1] for cost in orders.cost] for kind in (0, 2, 4)]
    means = [(pair[0] if len(set(pair)) == 1 else sum(pair) / n) / 2 for pair in pairs]
    memory = (orders.memory[0], orders.memory[2], orders.memory[4])
    return Sizes(
        n, orders.n_micro, (means[0], means[1], means[2]), orders.hop, memory, orders.max_mem
    )


def published_order(orders: VOrders) -> Order | None:
    """What the published method makes; None where it finds nothing within the memory."""
    try:
        return _order_of(best_attempt(published_sizes(orders)))
    except ScheduleError:
        return None


def torch_order(orders: VOrders) -> Order | None:
    """Torch's ZBV; None where it exceeds the memory, or this torch does not have it."""
    try:
        order = orders.order_of(torch_schedule("zbv", orders.n_ranks, orders.n_micro))
    except ImportError:
        return None
    return order if all(map(orders.is_valid, order)) else None


def starts(orders: VOrders, rng: Random) -> Iterator[Order]:
    """Further orders, without an end: the published method with other costs, and greedy ones."""
    yield GreedyOrder(orders, GreedyRules.plain(orders)).make()
    sizes = published_sizes(orders)
    f = sizes.costs[0]
    ways = [(True, True), (True, False), (False, True), (False, False)]
    hops = (orders.hop, *(f * hop for hop in _HOPS))
    tries = list(product([(f * a, f * b, f * w) for a, b, w in _RATIOS], hops, ways))
    tries += list(product([sizes.costs], hops, ways))
    rng.shuffle(tries)
    for costs, hop, way in tries:
        yield from _restarted(sizes._replace(costs=costs, hop=hop), *way)
        yield GreedyOrder(orders, GreedyRules.drawn(orders, rng)).make()
    while True:
        costs = (f, f * rng.uniform(0.4, 2.5), f * rng.uniform(0.2, 1.5))
        drawn = sizes._replace(costs=costs, hop=f * 10 ** rng.uniform(-3, -0.2))
        yield from _restarted(drawn, *rng.choice(ways))
        yield GreedyOrder(orders, GreedyRules.drawn(orders, rng)).make()


def _restarted(sizes: Sizes, fill_f: bool, fill_b: bool) -> Iterator[Order]:
    try:
        yield _order_of(try_twice(sizes, fill_f, fill_b))
    except ScheduleError:
        return  # the published method needs more memory


def _order_of(attempt: AttemptResult) -> Order:
    return [[2 * category + raw for category, raw, _ in row] for row in attempt.schedule]

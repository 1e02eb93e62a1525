"""Costs of the steps of layers, for the tests of planned orders."""

from __future__ import annotations

from swpipe.core.costs import CostModel, TaskCost
from swpipe.plans.transformer import LayerStep


def costs(plan_steps: tuple[LayerStep, ...], exchange_us: float) -> CostModel:
    """Computation of 1 ms forward, and as much for each half of backward; exchanges take longer."""
    found = {}
    for step in plan_steps:
        device_us = 1000.0
        if step.exchanges:
            device_us = exchange_us if step.part == "start" else 0.0
        elif step.layer is None:
            device_us = 100.0
        found[step.name] = TaskCost(host_us=20.0, device_us=device_us)
    return CostModel(found)

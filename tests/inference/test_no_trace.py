"""Recording leaves no trace: all that its iterations change is put back, or named in a note."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swpipe import PipelineTask
from swpipe.inference import record
from tests.inference.loops import LOOPS, Parts

Change = Callable[[Any], None]


class Held:
    """A user's object."""

    count = 0
    made = 0

    def __init__(self) -> None:
        self.history: list[float] = []
        self.window = deque([0.0], maxlen=2)
        self.nested = {"best": {"loss": 1.0}}
        self.names = {"a"}
        self.array = bytearray(b"ab")


PARTS = Parts(nn.Linear(4, 4), nn.BatchNorm1d(4))
HELD = Held()
TOTAL = 0


def _count(ctx: Any) -> None:
    HELD.count += 1


def _count_in_class(ctx: Any) -> None:
    Held.made += 1


def _count_globally(ctx: Any) -> None:
    global TOTAL
    TOTAL += 1


def _append(ctx: Any) -> None:
    HELD.history.append(1.0)
    HELD.window.append(2.0)
    HELD.names.add("b")


def _nested(ctx: Any) -> None:
    HELD.nested["best"]["loss"] *= 0.5
    HELD.nested["worst"] = {}


def _replace_a_list(ctx: Any) -> None:
    HELD.history = [*HELD.history, 2.0]


def _new_attribute(ctx: Any) -> None:
    HELD.began = getattr(HELD, "began", 0) + 1  # type: ignore[attr-defined]


def _delete(ctx: Any) -> None:
    if hasattr(HELD, "array"):
        del HELD.array


def _rate(ctx: Any) -> None:
    PARTS.optimizer.param_groups[0]["lr"] *= 0.5


def _freeze(ctx: Any) -> None:
    PARTS.model[0].requires_grad_(False)


def _mode(ctx: Any) -> None:
    PARTS.model.eval()


def _replace_a_weight(ctx: Any) -> None:
    PARTS.model[0].weight = nn.Parameter(PARTS.model[0].weight.detach() * 2)


def _add_group(ctx: Any) -> None:
    if len(PARTS.optimizer.param_groups) == 1:
        PARTS.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def _hook(ctx: Any) -> None:
    PARTS.model.register_forward_hook(lambda *given: None)


def _number_in_module(ctx: Any) -> None:
    PARTS.model.steps = getattr(PARTS.model, "steps", 0) + 1


def _momentum(ctx: Any) -> None:
    PARTS.model[1].momentum = 0.5


def _tied(ctx: Any) -> None:
    PARTS.model[2].bias = PARTS.model[0].bias


def _settings(ctx: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)


CHANGES: list[Change] = [
    _count, _count_in_class, _count_globally, _append, _nested, _replace_a_list, _new_attribute,
    _delete, _rate, _freeze, _mode, _replace_a_weight, _add_group, _hook, _number_in_module,
    _momentum, _settings,
]  # fmt: skip


def _trace() -> list[Any]:
    """Everything that the tasks of this module can change."""
    model, optimizer = PARTS.model, PARTS.optimizer
    attributes = copy.deepcopy({**vars(HELD), "made": Held.made, "count": HELD.count, "t": TOTAL})
    modules = [
        (
            m.training,
            getattr(m, "momentum", 0),
            getattr(m, "steps", 0),
            list(m._forward_hooks),
            [(n, id(p), p.requires_grad, p.tolist()) for n, p in m.named_parameters()],
        )
        for m in model.modules()
    ]
    options = [
        ({k: v for k, v in g.items() if k != "params"}, [id(p) for p in g["params"]])
        for g in optimizer.param_groups
    ]
    settings = [
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
    ]
    return [attributes, modules, options, len(optimizer.state), settings]


@pytest.mark.parametrize("change", CHANGES, ids=lambda fn: fn.__name__.strip("_"))
def test_what_a_task_changes_is_put_back(change: Change) -> None:
    """Counters, lists, options, flags, hooks, a parameter replaced by another."""
    before = _trace()
    record([PipelineTask("change", change)], torch.rand(3, 4), device="cpu")
    assert _trace() == before


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_as_it_was(name: str) -> None:
    """Also what its tasks count and keep."""
    loop = LOOPS[name]()
    before = loop.state()
    record(loop.tasks, torch.rand(3, 4), device="cpu", iterations=12)
    torch.testing.assert_close(loop.state(), before, rtol=0, atol=0)

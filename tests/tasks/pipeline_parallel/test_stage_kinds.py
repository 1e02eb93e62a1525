"""Stages of many kinds, under all schedules: gradients, buffers, hooks are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from swpipe.plans.pipeline_parallel import PipelineSchedule, ScheduleError
from swpipe.plans.pipeline_parallel import torch_schedule as of_torch
from swpipe.tasks.pipeline_parallel import PipelineRuntime, SerialRuntime
from tests.support.ranks import Ranks
from tests.tasks.pipeline_parallel.by_hand import PlainLoop
from tests.tasks.pipeline_parallel.small_gpt import random_schedule

SIZE, N_MICRO = 4, 4

Forward: TypeAlias = Callable[["Stage", Any], Any]


class AddsToGrad(torch.autograd.Function):
    """A linear map whose backward adds to the weight's gradient itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Of rows."""
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Of the rows; nothing of the weight for autograd."""
        x, weight = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad += grads[0].t() @ x
        return grads[0] @ weight, None


class AddsUnseen(torch.autograd.Function):
    """The same of a weight that autograd is not told of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:
        """Of rows."""
        ctx.save_for_backward(x)
        ctx.linear = linear
        return functional.linear(x, linear.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Of the rows."""
        weight, (x,) = ctx.linear.weight, ctx.saved_tensors
        grad = grads[0].t() @ x
        weight.grad = grad if weight.grad is None else weight.grad + grad
        return grads[0] @ weight.detach(), None


class Doubled(torch.autograd.Function):
    """A function of its own that uses no weight, as a fused activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of anything."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Of anything."""
        return grads[0] * 2


class Stage(nn.Module):
    """Parts that a kind may use, with counters of what hooks see."""

    def __init__(self, kind: str, stage: int, n_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.kind, self.is_first, self.is_last = kind, stage == 0, stage == n_stages - 1
        self.linear, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        if kind == "running means":
            self.batch_norm = nn.BatchNorm1d(SIZE)
        self.shift, self.unused = nn.Parameter(torch.randn(SIZE)), nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.seen = {"forward": 0, "hook": 0}
        SETUP.get(kind, lambda stage: None)(self)

    def forward(self, *given: Any, scale: Tensor | None = None) -> Any:
        """Of rows."""
        self.seen["forward"] += 1
        x = given[0] if len(given) == 1 else given
        return KINDS[self.kind](self, x if scale is None else (x, scale))

    def count(self, value: Any = None) -> None:
        """One more call of a hook."""
        self.seen["hook"] += 1


def _halved(stage: Stage, grad: Tensor) -> Tensor:
    stage.count()
    return grad * 0.5


def _clamped(stage: Stage, parameter: Tensor) -> None:
    stage.count()
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.001, 0.001)


def _full_hook(stage: Stage) -> None:
    def halved(module: nn.Module, given: Any, grads: Any) -> Any:
        stage.count()
        return tuple(None if grad is None else grad * 0.5 for grad in given)

    stage.linear.register_full_backward_hook(halved)
    stage.register_full_backward_hook(halved)


class LazyOnes(nn.LazyLinear):
    """Whose first weights are no random numbers."""

    def reset_parameters(self) -> None:
        """To ones, when their shape is known."""
        if not self.has_uninitialized_params() and self.in_features:
            with torch.no_grad():
                self.weight.fill_(1)
                self.bias.fill_(1)


def _lazy(stage: Stage) -> None:
    stage.linear = LazyOnes(SIZE)  # type: ignore[assignment]


SETUP: dict[str, Callable[[Stage], Any]] = {
    "hook of a weight": lambda s: s.linear.weight.register_hook(lambda grad: _halved(s, grad)),
    "hook after accumulation": lambda s: s.linear.weight.register_post_accumulate_grad_hook(
        lambda parameter: _clamped(s, parameter)
    ),
    "hooks of modules": _full_hook,
    "forward hook": lambda s: s.linear.register_forward_hook(lambda *_: s.count()),
    "lazy": _lazy,
    "all frozen": lambda s: None if s.is_first else s.requires_grad_(False),
}


def _with_ids(stage: Stage, x: Any) -> Any:
    values, ids = (x, torch.arange(len(x))) if isinstance(x, Tensor) else x
    out = stage.linear(values) + ids[:, None]
    return out if stage.is_last else (out, ids)


def _of_two(stage: Stage, x: Any) -> Any:
    left, right = (x, x * 2) if isinstance(x, Tensor) else x
    pair = stage.linear(left), torch.tanh(right)
    return pair[0] + pair[1] if stage.is_last else pair


def _one_is_left(stage: Stage, x: Any) -> Any:
    left = x if isinstance(x, Tensor) else x[0]
    out = stage.linear(left)
    return out if stage.is_last else (out, torch.tanh(left) * stage.shift)


KINDS: dict[str, Forward] = {
    "once": lambda s, x: torch.tanh(s.linear(x)),
    "looped": lambda s, x: s.linear(torch.tanh(s.linear(x))),
    "tied": lambda s, x: functional.linear(torch.tanh(s.linear(x)), s.linear.weight.t()),
    "norm twice": lambda s, x: s.norm(s.linear(s.norm(x))),
    "frozen between": lambda s, x: s.linear(torch.tanh(s.frozen(s.norm(x)))),
    "residual": lambda s, x: x + s.linear(s.norm(x)),
    "weights alone": lambda s, x: x + s.shift * s.linear.weight.sum(),
    "input detached": lambda s, x: x + s.linear(x.detach()),
    "no way to the input": lambda s, x: s.linear(x.detach()),
    "identity": lambda s, x: s.linear(x) if s.is_first else x,
    "running means": lambda s, x: s.batch_norm(s.linear(x)),
    "checkpoint": lambda s, x: checkpoint(
        lambda y: torch.tanh(s.linear(s.norm(y))), x, use_reentrant=False
    ),
    "reentrant checkpoint": lambda s, x: checkpoint(
        lambda y: torch.tanh(s.linear(s.norm(y))),
        x if x.requires_grad or not torch.is_grad_enabled() else x.clone().requires_grad_(),
        use_reentrant=True,
    ),
    "adds to grad": lambda s, x: AddsToGrad.apply(torch.tanh(s.linear(x)), s.linear.weight),
    "adds to grad unseen": lambda s, x: AddsUnseen.apply(s.norm(x), s.linear),
    "own function": lambda s, x: Doubled.apply(s.linear(Doubled.apply(s.norm(x)))),
    "hook of a weight": lambda s, x: torch.tanh(s.linear(x)),
    "hook after accumulation": lambda s, x: torch.tanh(s.linear(x)),
    "hooks of modules": lambda s, x: torch.tanh(s.linear(x)),
    "forward hook": lambda s, x: torch.tanh(s.linear(x)),
    "lazy": lambda s, x: torch.tanh(s.linear(x)),
    "all frozen": lambda s, x: torch.tanh(s.linear(x)),
    "gives a view": lambda s, x: s.linear(x).view(-1, SIZE),
    "passes ids on": _with_ids,
    "two values": _of_two,
    "one value left": _one_is_left,
    "a dict at the end": lambda s, x: {"out": s.linear(x)} if s.is_last else s.linear(x),
    "a list": lambda s, x: s.linear(x) if s.is_last else [s.linear(x)],
    "keyword": lambda s, x: s.linear(x[0]) * x[1],
}

SCHEDULES: dict[str, Callable[[], PipelineSchedule | None]] = {
    "serial runtime": lambda: None,
    "zbv": lambda: of_torch("zbv", 1, N_MICRO),
    "dualpipev": lambda: of_torch("dualpipev", 1, N_MICRO),
    "four stages": lambda: random_schedule((0, 0, 0, 0), N_MICRO, 1),
}

NOT_IN_ORDER = {
    "reentrant checkpoint": "cannot be split",
    "adds to grad": "cannot be split",
    "adds to grad unseen": "cannot be split",
    "running means": "which a pass may change",
}
"""What is refused where F or I are not in the order of the microbatches, and in which words."""


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss."""
    value = output["out"] if isinstance(output, dict) else output
    out: Tensor = (value - target).square().mean()
    return out


def different(kind: str, schedule: PipelineSchedule | None) -> list[str]:
    """What differs from a plain loop after two steps of a kind; None for the serial runtime."""
    n = 2 if schedule is None else schedule.n_stages
    pairs = [[Stage(kind, stage, n) for stage in range(n)] for _ in range(2)]
    runtime: Any = SerialRuntime(pairs[0], N_MICRO, loss_of)
    if schedule is not None:
        runtime = PipelineRuntime(schedule, dict(enumerate(pairs[0])), loss_of)
    loop = PlainLoop(pairs[1], N_MICRO, loss_of)
    draw = torch.Generator().manual_seed(7)
    found = []
    for step in range(2):
        x, y = (torch.randn(2 * N_MICRO, SIZE, generator=draw) for _ in range(2))
        keywords = {"scale": torch.rand(2 * N_MICRO, 1)} if kind == "keyword" else {}
        runtime.train(x, target=y, accumulate=step == 1, keywords=keywords)
        loop.train(x, target=y, accumulate=step == 1, **keywords)
        for stage, (own, other) in enumerate(zip(*pairs, strict=True)):
            if own.seen != other.seen:
                found.append(f"step {step} stage {stage}: {own.seen}, not {other.seen}")
            tensors = [
                {
                    **{name: p.grad for name, p in module.named_parameters()},
                    **dict(module.named_buffers()),
                }
                for module in (own, other)
            ]
            found += [
                f"step {step} stage {stage}: {name}"
                for name, one in tensors[0].items()
                if not _equal(one, tensors[1][name])
            ]
    return found


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def all_different() -> dict[tuple[str, str], list[str]]:
    """Of all kinds under all schedules, what differs, or is refused."""
    found = {}
    schedules = {name: make() for name, make in SCHEDULES.items()}
    for name, schedule in schedules.items():
        for kind in KINDS:
            try:
                found[name, kind] = different(kind, schedule)
            except (RuntimeError, ScheduleError) as error:
                found[name, kind] = [str(error.__cause__ or error)]
    return found


def test_stages_of_any_kind_give_the_numbers_of_one_process(one_rank: Ranks) -> None:
    """Two steps, the second of which adds to gradients: equal, or refused in words."""
    (found,) = one_rank.run(all_different, deadline_s=240.0)
    for kind, words in NOT_IN_ORDER.items():
        (told,) = found.pop(("four stages", kind))
        assert words in told
    assert not {key: told for key, told in found.items() if told}


def run_dict_between() -> None:
    """A step of a stage that gives a dict to the next one."""
    KINDS["dict"] = lambda s, x: {"out": x}
    different("dict", of_torch("zbv", 1, N_MICRO))


def test_a_dict_between_stages_is_refused(one_rank: Ranks) -> None:
    """In words; it names the stage, and does not print the values."""
    with pytest.raises(TypeError, match="stage 0 gives a dict, of which not all is a tensor"):
        one_rank.run(run_dict_between)

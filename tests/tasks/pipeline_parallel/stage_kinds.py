"""Stages of many kinds, their models, and the differences from one process after two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from swpipe.plans.pipeline_parallel import PipelineSchedule
from swpipe.tasks.pipeline_parallel import PipelineRuntime, SerialRuntime
from tests.tasks.pipeline_parallel.by_hand import PlainLoop

SIZE = 4

Forward: TypeAlias = Callable[["Stage", Any], Any]


class AddsToGrad(torch.autograd.Function):
    """A linear map whose backward adds to the weight's gradient itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Map rows."""
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the rows; autograd gets none for the weight."""
        x, weight = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad += grads[0].t() @ x
        return grads[0] @ weight, None


class AddsUnseen(torch.autograd.Function):
    """A linear map like ``AddsToGrad``, whose weight is unknown to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:
        """Map rows."""
        ctx.save_for_backward(x)
        ctx.linear = linear
        return functional.linear(x, linear.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the rows."""
        weight, (x,) = ctx.linear.weight, ctx.saved_tensors
        grad = grads[0].t() @ x
        weight.grad = grad if weight.grad is None else weight.grad + grad
        return grads[0] @ weight.detach(), None


class Doubled(torch.autograd.Function):
    """An autograd function without a weight, such as a fused activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return twice the tensor."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return twice the gradient."""
        return grads[0] * 2


class Stage(nn.Module):
    """A stage whose kind selects its parts, with counters of what hooks see."""

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
        """Map rows."""
        self.seen["forward"] += 1
        x = given[0] if len(given) == 1 else given
        return KINDS[self.kind](self, x if scale is None else (x, scale))

    def count(self, value: Any = None) -> None:
        """Count a call of a hook."""
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
    """A lazy linear map whose first weights are ones."""

    def reset_parameters(self) -> None:
        """Set the weights to one when their shape is known."""
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


@dataclass
class Hidden:
    """A structured value that a stage passes on."""

    values: Tensor
    mask: Tensor
    scale: float
    note: None = None


def _transposed(stage: Stage, x: Tensor) -> Tensor:
    out = stage.linear(x)
    return out if stage.is_last else out.t().contiguous().t()


def _pooled(stage: Stage, x: Tensor) -> Tensor:
    """Return the mean of the rows, whose gradient for the input is one row, expanded."""
    return stage.linear(x) if stage.is_first else stage.linear(x.sum(0)[None].expand(len(x), SIZE))


def _expanded(stage: Stage, x: Tensor) -> Tensor:
    out = stage.linear(x)
    return out if stage.is_last else out.mean(0, keepdim=True).expand(len(x), SIZE)


def _slice(stage: Stage, x: Tensor) -> Tensor:
    out = stage.linear(x)
    return out if stage.is_last else torch.cat([out, out * 2], 1)[:, ::2]


def _unfolded(stage: Stage, x: Tensor) -> Tensor:
    values = x if stage.is_first else x.sum(2)
    out = stage.linear(values)
    return out if stage.is_last else torch.cat([out, out[:, :1]], 1).unfold(1, 2, 1)


def _complex(stage: Stage, x: Tensor) -> Tensor:
    values = x if stage.is_first else x.real + x.imag
    out = stage.linear(values)
    return out if stage.is_last else torch.complex(out, out.tanh())


def _conjugate(stage: Stage, x: Tensor) -> Tensor:
    out = _complex(stage, x)
    return out if stage.is_last else out.conj()


def _negative(stage: Stage, x: Tensor) -> Tensor:
    out = stage.linear(x)
    return out if stage.is_last else torch.complex(out, out).conj().imag


def _dict(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else x["deep"][0] + x["scale"]
    out = stage.linear(values)
    return out if stage.is_last else {"deep": [out, None], "scale": 0.5}


def _dataclass(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else torch.where(x.mask, x.values, x.scale)
    out = stage.linear(values)
    return out if stage.is_last else Hidden(out, out > 0, 0.25)


def _numbers(stage: Stage, x: Any) -> Any:
    values, factor = (x, 1) if stage.is_first else (x[0], x[2])
    out = stage.linear(values) * factor
    return out if stage.is_last else (out, None, 3, "text", 1j)


def _empty(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else x[0] + x[1].sum()
    out = stage.linear(values)
    return out if stage.is_last else (out, out[:0].t(), torch.tensor(2))


def _half(stage: Stage, x: Tensor) -> Tensor:
    out = stage.linear(x.float())
    return out if stage.is_last else out.bfloat16()


def _twice(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else x[0] * x[1]
    out = stage.linear(values)
    return out if stage.is_last else (out, out)


def _some_require_grad(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else x["out"] + x["fixed"]
    out = stage.linear(values)
    return out if stage.is_last else {"fixed": out.detach().tanh(), "out": out}


def _sparse(stage: Stage, x: Tensor) -> Tensor:
    values = x.to_dense() if x.is_sparse else x
    out = stage.linear(values)
    return out if stage.is_last else out.to_sparse()


def _function(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else x()
    out = stage.linear(values)
    return out if stage.is_last else lambda: out


def _changing(stage: Stage, x: Any) -> Any:
    values = x if stage.is_first else x.sum(0)
    out = stage.linear(values)
    return out if stage.is_last else out.expand(1 + stage.seen["forward"] % 2, *out.shape)


def _raises_late(stage: Stage, x: Tensor) -> Tensor:
    out: Tensor = stage.linear(x)
    if stage.is_last and stage.seen["forward"] == 2:
        raise ZeroDivisionError("planted in a forward pass")
    return out


def _raises_back(stage: Stage, x: Tensor) -> Tensor:
    def planted(grad: Tensor) -> None:
        raise ZeroDivisionError("planted in a backward pass")

    out: Tensor = stage.linear(x)
    if stage.is_last and stage.seen["forward"] == 2:
        out.register_hook(planted)
    return out


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
    "output transposed": _transposed,
    "gradient expanded": _pooled,
    "output expanded": _expanded,
    "a slice": _slice,
    "windows": _unfolded,
    "complex": _complex,
    "conjugate": _conjugate,
    "negative": _negative,
    "a dict": _dict,
    "a dataclass": _dataclass,
    "None and numbers": _numbers,
    "empty": _empty,
    "bfloat16": _half,
    "one tensor twice": _twice,
    "some require gradients": _some_require_grad,
    "sparse": _sparse,
    "a function": _function,
    "changing shapes": _changing,
    "raises in forward": _raises_late,
    "raises in backward": _raises_back,
}


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return a loss."""
    value = output["out"] if isinstance(output, dict) else output
    out: Tensor = (value - target).square().mean()
    return out


def different(
    kind: str, schedule: PipelineSchedule | None, *, varying_shapes: bool = False
) -> list[str]:
    """Train two steps of a kind, and return how this rank's stages differ from a plain loop.

    With None as the schedule, the serial runtime trains two stages.
    """
    n, n_micro = (2, 4) if schedule is None else (schedule.n_stages, schedule.n_micro)
    whole = [Stage(kind, stage, n) for stage in range(n)]
    if schedule is None:
        ours = {stage: Stage(kind, stage, n) for stage in range(n)}
        runtime: Any = SerialRuntime([*ours.values()], n_micro, loss_of)
    else:
        here = [s for s, place in enumerate(schedule.placement) if place == dist.get_rank()]
        ours = {stage: Stage(kind, stage, n) for stage in here}
        runtime = PipelineRuntime(schedule, ours, loss_of, varying_shapes=varying_shapes)
    loop = PlainLoop(whole, n_micro, loss_of)
    draw = torch.Generator().manual_seed(7)
    found = []
    for step in range(2):
        x, y = (torch.randn(2 * n_micro, SIZE, generator=draw) for _ in range(2))
        keywords = (
            {"scale": torch.rand(2 * n_micro, 1, generator=draw)} if kind == "keyword" else {}
        )
        runtime.train(x, target=y, accumulate=step == 1, keywords=keywords)
        loop.train(x, target=y, accumulate=step == 1, **keywords)
        for stage, own in ours.items():
            other = whole[stage]
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


class Outcome(NamedTuple):
    """The outcome of a kind under a schedule on one rank.

    Attributes:
        different: The differences; empty if all is equal.
        refused: The error, with its notes; empty where there was none.
        when_s: The time of the error, of a clock that all ranks share.
    """

    different: list[str]
    refused: str = ""
    when_s: float = 0.0


def outcomes(
    cases: list[tuple[str, PipelineSchedule | None]], varying_shapes: bool = False
) -> list[Outcome]:
    """Run several kinds under their schedules, one after the other, and return the outcomes."""
    told = []
    for kind, schedule in cases:
        try:
            told.append(Outcome(different(kind, schedule, varying_shapes=varying_shapes)))
        except Exception as error:  # noqa: BLE001 - compared by the test, with those of other ranks
            notes = " ".join([str(error), *getattr(error, "__notes__", [])])
            told.append(Outcome([], notes, time.monotonic()))
    return told

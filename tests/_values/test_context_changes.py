"""Changes of a task to its context are found at any depth, and no others are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe._values.context_log import ContextWatch
from swpipe._values.fingerprint import Fingerprint


@dataclass
class Batch:
    x: Tensor
    label: str = "l"


class Lazy:
    """An object that computes its length on request, like torchrec's jagged tensors."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.name: str | None = None
        self._length: int | None = None

    def length(self) -> int:
        if self._length is None:
            self._length = len(self.x)
        return self._length

    def record_stream(self, stream: object) -> None: ...


def x() -> Tensor:
    return torch.ones(3)


def context() -> SimpleNamespace:
    return SimpleNamespace(
        iter_idx=3,
        tensor=x(),
        leaf=x().requires_grad_(),
        listing=[x(), [x()]],
        mapping={"a": x(), "b": 1},
        batch=Batch(x()),
        lazy=Lazy(x()),
        parameter=torch.nn.Parameter(x()),
        pair=(x(), 1.5),
    )


def changes(
    task: Callable[[Any], object], ctx: Any = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ctx = context() if ctx is None else ctx
    with ContextWatch(ctx) as watch:
        task(ctx)
    return watch.produced, watch.deleted


def rename_item(ctx: Any) -> None:
    ctx.mapping["c"] = ctx.mapping.pop("b")


def set_attribute(ctx: Any) -> None:
    ctx.batch.label = "m"


def name_lazy(ctx: Any) -> None:
    ctx.lazy.name = "n"


@pytest.mark.parametrize(
    ("task", "produced"),
    [
        (lambda ctx: setattr(ctx, "new", 1), "new"),
        (lambda ctx: setattr(ctx, "tensor", x()), "tensor"),
        (lambda ctx: ctx.tensor.add_(1), "tensor"),
        (lambda ctx: ctx.tensor[1:].add_(1), "tensor"),
        (lambda ctx: ctx.tensor.requires_grad_(), "tensor"),
        (lambda ctx: ctx.listing.append(1), "listing"),
        (lambda ctx: ctx.listing[1].append(1), "listing"),
        (lambda ctx: ctx.listing[1][0].add_(1), "listing"),
        (lambda ctx: ctx.listing.reverse(), "listing"),
        (lambda ctx: ctx.mapping["a"].add_(1), "mapping"),
        (lambda ctx: ctx.mapping.update(b=2), "mapping"),
        (rename_item, "mapping"),
        (lambda ctx: ctx.batch.x.add_(1), "batch"),
        (set_attribute, "batch"),
        (lambda ctx: ctx.pair[0].add_(1), "pair"),
        (lambda ctx: ctx.lazy.x.add_(1), "lazy"),
        (name_lazy, "lazy"),
        (lambda ctx: (ctx.leaf * 2).sum().backward(), "leaf"),
    ],
)
def test_each_change_is_seen_and_no_other(task: Callable[[Any], object], produced: str) -> None:
    """If one attribute was added, rebound or modified in place, only that one is reported."""
    assert changes(task) == ((produced,), ())


def test_deleted_attributes_are_listed() -> None:
    """They are reported by name."""
    assert changes(lambda ctx: delattr(ctx, "batch")) == ((), ("batch",))


@pytest.mark.parametrize(
    "task",
    [
        lambda ctx: None,
        lambda ctx: (ctx.tensor * 2, ctx.listing[0].sum(), ctx.mapping["a"].view(-1)),
        lambda ctx: setattr(ctx, "tensor", ctx.tensor),
        lambda ctx: ctx.lazy.length(),
        lambda ctx: ctx.parameter.detach().add_(1),  # as every step does
        lambda ctx: setattr(ctx.parameter, "grad", x()),
    ],
)
def test_reading_is_no_change(task: Callable[[Any], object]) -> None:
    """Reads, lazily cached results and values of parameters do not count."""
    assert changes(task) == ((), ())


@pytest.mark.parametrize(
    "act",
    [
        lambda leaf: (leaf * 2).sum().backward(),
        lambda leaf: setattr(leaf, "grad", None),
        lambda leaf: setattr(leaf, "grad", x()),
    ],
)
def test_a_gradient_that_is_added_to_or_replaced_is_seen(act: Callable[[Tensor], object]) -> None:
    """The gradient changes in place, or is replaced, with any version."""
    ctx = context()
    ctx.leaf.grad = x()
    assert changes(lambda ctx: act(ctx.leaf), ctx) == (("leaf",), ())


@torch.inference_mode()
def test_tensors_without_version_counters_are_compared() -> None:
    """In inference mode the numbers are compared, NaN included; what was only read is unchanged."""
    ctx = SimpleNamespace(a=x(), b=torch.tensor([float("nan"), 1.0]), c=x().to_sparse())
    ctx.wide = torch.ones(1).expand(3)
    ctx.on_a_device = torch.ones(3, device="meta")
    assert changes(lambda ctx: ctx.a.add_(1), ctx) == (("a",), ())
    assert changes(lambda ctx: ctx.b + 1, ctx) == ((), ())
    assert changes(lambda ctx: ctx.b[1:].zero_(), ctx) == (("b",), ())
    assert changes(lambda ctx: ctx.c.mul_(2), ctx) == (("c",), ())


def test_a_reused_id_is_not_taken_for_the_old_object() -> None:
    """Watched values stay alive, so no new object has the id of an old one."""
    ctx = SimpleNamespace(thing=[object()])
    for _ in range(50):

        def swap(ctx: Any) -> None:
            ctx.thing[0] = None
            ctx.thing[0] = object()

        assert changes(swap, ctx) == (("thing",), ())


def test_a_gradient_of_an_inner_tensor_is_read_without_a_warning() -> None:
    """Tensors that are no leaves are watched too, without the warning about their .grad."""
    ctx = context()
    ctx.inner = ctx.leaf * 2
    ctx.inner.retain_grad()
    assert changes(lambda ctx: ctx.inner.sum().backward(), ctx) == (("leaf", "inner"), ())


def test_an_array_that_gets_another_shape_in_place_is_changed() -> None:
    """It counts as changed, though its bytes are the same."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(4)
    before = Fingerprint(array)
    assert not before.changed()
    array.resize((2, 2), refcheck=False)
    assert before.changed()

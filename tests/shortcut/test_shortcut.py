"""A replayed task leaves what its cached run left, and runs nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe._values.walk import map_tensors
from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.errors import ShortcutError
from swpipe.shortcut import Shortcuts
from swpipe.shortcut.handed_out import MAX_WATCHED
from tests.shortcut.loops import NAMES, Loop

Fn = Callable[[Any], object]


def x(value: float = 1.0) -> Tensor:
    return torch.full((3,), float(value))


def weight(value: float = 2.0) -> Tensor:
    return x(value).requires_grad_()


class Shortcut:
    """A task that is shortcut from the start, and counts the runs of its function."""

    def __init__(self, fn: Fn, io: Sequence[DeclaredIO] = ()) -> None:
        self.runs = 0
        self._fn = fn
        self.task = PipelineTask("t", self._counted, io=io)
        self.shortcuts = Shortcuts()
        self.shortcuts.enable(["t"])

    def _counted(self, ctx: Any) -> None:
        self.runs += 1
        self._fn(ctx)

    def __call__(self, **attributes: Any) -> Any:
        """Run one iteration on a context with these attributes, and return the context."""
        ctx = SimpleNamespace(**attributes)
        self.shortcuts.run(self.task, ctx)
        return ctx

    def twice(self, make: Callable[[], dict[str, Any]] = dict) -> Any:
        """Run the task and then a replay on new contexts; return the context of the replay."""
        self(**make())
        assert self.runs == 1
        ctx = self(**make())
        assert self.runs == 1
        return ctx


def assign(**attributes: Any) -> Fn:
    return lambda ctx: vars(ctx).update(attributes)


def written_out(tensor: Tensor) -> tuple[torch.dtype, bool, list[float]]:
    return tensor.dtype, tensor.requires_grad, tensor.tolist()


# ----------------------------------------------------------------------------- modes


def test_a_task_runs_once_and_is_replayed_from_then_on() -> None:
    """One run is cached, then replayed; after disabling, the task runs.

    The engine looks tasks up in one view, which changes with them.
    """
    shortcut = Shortcut(assign(y=x(5)))
    names = shortcut.shortcuts.names
    for _ in range(3):
        assert torch.equal(shortcut().y, x(5))
        shortcut.shortcuts.enable(["t"])
    assert shortcut.runs == 1
    shortcut.shortcuts.disable(["t", "c"])
    assert names == set()
    for runs in (2, 3):
        shortcut()
        assert shortcut.runs == runs
    for _ in range(2):
        shortcut.shortcuts.enable(["t"])
        shortcut()
    assert shortcut.runs == 4
    assert names == {"t"}
    assert names is shortcut.shortcuts.names


def test_the_cached_run_is_the_task_s_own() -> None:
    """The iteration whose outputs are cached continues with the task's own objects."""
    made = x(5)
    ctx = Shortcut(assign(y=made))()
    assert ctx.y is made


def test_a_failing_task_leaves_no_cache() -> None:
    """The next run tries again."""

    def fail(ctx: Any) -> None:
        raise ValueError("no")

    shortcut = Shortcut(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            shortcut()
    assert shortcut.runs == 2


def test_the_cache_holds_no_context_and_is_dropped_when_disabled() -> None:
    """The task's inputs are freed with the context; its outputs are kept until disabling."""
    upstream, thing = weight() * 2, type("Thing", (), {})()
    gone, produced = weakref.ref(upstream), weakref.ref(thing)
    things = [thing]

    def make(ctx: Any) -> None:
        ctx.y = ctx.x * 2
        ctx.thing = things.pop()

    shortcut = Shortcut(make)
    made = weakref.ref(shortcut(x=upstream).y)
    shortcut(x=weight())
    del upstream, thing
    gc.collect()
    assert (gone(), made()) == (None, None)
    assert produced() is not None
    shortcut.shortcuts.disable(["t"])
    gc.collect()
    assert produced() is None


def test_leaves_of_the_cached_run_are_not_held() -> None:
    """These are leaves that it made and used, and leaves that got a gradient."""

    def cut(ctx: Any) -> None:
        ctx.y = ctx.x.detach().requires_grad_()
        ctx.z = ctx.y * 2
        ctx.loss.backward()

    def start() -> dict[str, Tensor]:
        leaf = weight()
        return {"x": weight(), "leaf": leaf, "loss": (leaf * 2).sum()}

    shortcut = Shortcut(cut)
    ctx = shortcut(**start())
    ctx.z.sum().backward()
    gone = [weakref.ref(ctx.y), weakref.ref(ctx.leaf)]
    del ctx
    shortcut(**start())
    gc.collect()
    assert [one() for one in gone] == [None, None]


# ------------------------------------------------------------------ what is put back


class Pair(NamedTuple):
    first: Tensor
    flag: bool


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str


@dataclass
class Batch:
    dense: Tensor
    more: dict[str, list[Tensor]]


@pytest.mark.parametrize(
    "value",
    [
        x(5),
        torch.arange(3),
        torch.tensor(True),
        x(5).half(),
        [x(1), (x(2), {"a": x(3)})],
        (x(5), True),
        [(x(5), False), (x(6), True)],
        (x(5), 0, None),
        Pair(x(5), True),
        Frozen(x(5), "n"),
        Batch(x(1), {"a": [x(2), x(3)]}),
        {"nested": [Batch(x(1), {}), Pair(x(2), False)]},
        "text",
        None,
        3,
    ],
    ids=str,
)
def test_any_value_is_restored(value: Any) -> None:
    """Values are tensors of any type, nestings, and tuples that look like entries of a cache."""
    back = Shortcut(assign(y=value)).twice().y
    assert type(back) is type(value)
    assert map_tensors(back, written_out) == map_tensors(value, written_out)


def test_what_the_task_changed_comes_back() -> None:
    """Added, rebound and modified attributes are restored, also deep in a container.

    A parameter belongs to its module: it has no clone, and no graft.
    """
    own, parameter = x(9), torch.nn.Parameter(x())

    def modify(ctx: Any) -> None:
        ctx.old, ctx.new = x(2), [parameter]
        ctx.a.add_(1)
        ctx.b["c"][0].mul_(3)
        ctx.d.append(x(4))

    ctx = Shortcut(modify).twice(
        lambda: {"old": x(1), "other": own, "a": x(1), "b": {"c": [x(2)]}, "d": []}
    )
    assert torch.equal(ctx.old, x(2))
    assert ctx.new[0] is parameter
    assert ctx.other is own
    assert torch.equal(ctx.a, x(2))
    assert torch.equal(ctx.b["c"][0], x(6))
    assert torch.equal(ctx.d[0], x(4))


def test_deleted_attributes_are_deleted() -> None:
    """Replay deletes what the task deleted; an attribute that is absent already is no error."""

    def swap(ctx: Any) -> None:
        del ctx.c
        ctx.c = x(5)
        vars(ctx).pop("a", None)

    shortcut = Shortcut(swap)
    shortcut(a=1, b=2, c=x(1))
    for given in ({"a": 1}, {}):
        ctx = shortcut(b=2, c=x(1), **given)
        assert torch.equal(vars(ctx).pop("c"), x(5))
        assert vars(ctx) == {"b": 2}


def test_what_was_shared_comes_back_shared() -> None:
    """One tensor under two attributes, and in an io's state, is one tensor after replay."""
    shared = x(5)
    restored: list[Any] = []
    io = DeclaredIO(capture=lambda: {"s": shared}, restore=restored.append)
    ctx = Shortcut(assign(a=shared, b=[shared]), [io]).twice()
    assert ctx.a is ctx.b[0] is restored[0]["s"]
    assert ctx.a is not shared


def test_each_replay_builds_containers_anew() -> None:
    """A change of a replayed value, also in the cached iteration, leaves the cache intact."""
    shortcut = Shortcut(lambda ctx: vars(ctx).update(y=[x(5)], z={"a": [x()]}))
    for _ in range(3):
        ctx = shortcut()
        assert torch.equal(ctx.y[0], x(5))
        assert [len(ctx.y), len(ctx.z["a"])] == [1, 1]
        ctx.y[0].zero_()
        ctx.y.append(2)
        ctx.z["a"].append(3)
        ctx.z["b"] = 4


def test_replays_copy_nothing_once_no_task_was_seen_to_modify_it() -> None:
    """The first replay has its own memory; later ones share theirs."""
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", x(5)))
    cached, first, second, third = (shortcut().y for _ in range(4))
    assert second.data_ptr() == third.data_ptr()
    assert len({cached.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3
    assert second is not third


def test_a_container_that_makes_its_own_tensors_is_refused() -> None:
    """The error comes at once, with the attribute and the fix."""

    class Copying:
        def __init__(self, x: Tensor) -> None:
            self.x = x.clone()

    pytree.register_pytree_node(Copying, lambda v: ([v.x], None), lambda c, _: Copying(*c))
    shortcut = Shortcut(lambda ctx: setattr(ctx, "odd", [Copying(x())]))
    with pytest.raises(RuntimeError, match=r"'t'.*ctx\.odd.*dataclass"):
        shortcut()


# ------------------------------------------------- outputs that later tasks modify

MODIFYING: list[tuple[Any, Fn, str]] = [
    (x(5), lambda ctx: ctx.y.add_(1), r"ctx\.y"),
    ({"a": [x(5)]}, lambda ctx: ctx.y["a"][0].zero_(), r"ctx\.y"),
    (x(5), lambda ctx: ctx.y[1:].add_(1), r"ctx\.y"),
    (torch.arange(3), lambda ctx: ctx.y.add_(1), r"ctx\.y"),
]


@pytest.mark.parametrize(("value", "modify", "where"), MODIFYING)
def test_what_later_tasks_modify_comes_back_unmodified(value: Any, modify: Fn, where: str) -> None:
    """Each iteration gets the values of the cached run, though all before modified theirs."""
    before = map_tensors(value, Tensor.clone)
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", map_tensors(value, Tensor.clone)))
    for _ in range(4):
        ctx = shortcut()
        assert map_tensors(ctx.y, written_out) == map_tensors(before, written_out)
        modify(ctx)
    assert shortcut.runs == 1


@pytest.mark.parametrize(("value", "modify", "where"), MODIFYING)
def test_a_modified_cache_is_noticed(value: Any, modify: Fn, where: str) -> None:
    """It was shared when first modified: the next replay names it and both fixes."""
    shortcut = Shortcut(assign(y=value))
    for _ in range(3):
        ctx = shortcut()
    modify(ctx)
    with pytest.raises(ShortcutError, match=rf"'t'.*{where} was modified in place.*Clone it"):
        shortcut()
    with pytest.raises(ShortcutError, match=r"shortcut the task that.*disable_shortcut\('t'\)"):
        shortcut.shortcuts.check(["t"])
    shortcut.shortcuts.disable(["t"])
    shortcut.shortcuts.enable(["t"])
    shortcut()


def test_a_modified_io_state_is_noticed() -> None:
    """If someone modifies a restored tensor late, the error names its io."""
    states: list[Tensor] = []
    io = [
        DeclaredIO(capture=lambda: None, restore=lambda _: None),
        DeclaredIO(capture=lambda: x(5), restore=states.append),
    ]
    shortcut = Shortcut(assign(), io)
    for _ in range(3):
        shortcut()
    states[-1].add_(1)
    with pytest.raises(ShortcutError, match=r"state of io\[1\] was modified"):
        shortcut()


@torch.inference_mode()
def test_in_inference_mode_changes_are_seen_too() -> None:
    """The task's own tensors have no version counters, and are compared; the cache's have."""
    ctx = Shortcut(lambda ctx: ctx.a.add_(1)).twice(lambda: {"a": x(1), "b": x(7)})
    assert torch.equal(ctx.a, x(2))
    for first in (0, 2):  # the iteration in which a later task first modifies the output
        shortcut = Shortcut(lambda ctx: setattr(ctx, "y", x(5)))
        for number in range(4):
            if first and number == first + 1:
                with pytest.raises(ShortcutError, match="was modified in place"):
                    shortcut()
                assert not ctx.y.is_inference()  # it has the cache's memory, and its counter
                break
            ctx = shortcut()
            assert torch.equal(ctx.y, x(5))
            if number >= first:
                ctx.y.add_(1)


def test_an_activation_in_place_is_replayed() -> None:
    """A tensor that autograd computed may be modified in place, too, with right gradients."""
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", ctx.x * -2))
    for _ in range(4):
        w = weight()
        ctx = shortcut(x=w * 1)
        assert torch.equal(ctx.y, x(-4))
        ctx.y.relu_().sum().backward()
    assert torch.equal(w.grad, x(0))


def test_iterations_in_flight_do_not_share_what_may_be_modified() -> None:
    """Until an iteration has ended, it is not known what its later tasks modify.

    It is watched for a limited time: for a caller that keeps all contexts, not all replays are
    copied.
    """
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", x(5)))

    def begin(ctx: IterContext) -> int:
        shortcut.shortcuts.run(shortcut.task, ctx)
        assert torch.equal(ctx.y, x(5))
        return int(ctx.y.data_ptr())

    contexts = [IterContext(None, i) for i in range(MAX_WATCHED + 4)]
    places = list(map(begin, contexts))
    assert len(set(places[:MAX_WATCHED])) == MAX_WATCHED
    assert len(set(places[-2:])) == 1
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", x(5)))
    contexts = [IterContext(None, i) for i in range(4)]
    list(map(begin, contexts))
    for ctx in contexts:
        ctx.y.add_(1)
    ctx = contexts[0]
    contexts.clear()
    begin(ctx)


@pytest.mark.parametrize(
    ("produce", "base"),
    [
        (lambda ctx: vars(ctx).update(y=ctx.base[1:]), x),
        (lambda ctx: vars(ctx).update(y={"rows": [ctx.base.view(3, 1)]}), x),
        (lambda ctx: vars(ctx).update(y=ctx.base[1:]), lambda: np.ones(3)),
    ],
)
def test_a_change_through_the_base_of_a_view_is_refused(
    produce: Fn, base: Callable[[], Any]
) -> None:
    """The view of the cached run changed and that of a replay did not: no more are made."""
    shortcut = Shortcut(produce)
    for _ in range(2):
        ctx = shortcut(base=base())
        ctx.base += 1
    with pytest.raises(ShortcutError, match=r"'t'.*ctx\.y was modified.*base of a view.*Clone"):
        shortcut(base=base())


def test_a_view_may_be_modified_itself() -> None:
    """Its replay is then a copy, as for any other output."""
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", ctx.base[1:]))
    for _ in range(4):
        ctx = shortcut(base=x())
        assert torch.equal(ctx.y, x()[1:])
        ctx.y.add_(1)


def test_a_pair_of_tasks_may_modify_in_place() -> None:
    """The second task of a pair modifies what the first produced: both are replayed."""
    shortcuts = Shortcuts()
    tasks = [
        PipelineTask("a", lambda ctx: setattr(ctx, "y", x(1))),
        PipelineTask("b", lambda ctx: ctx.y.add_(1)),
    ]
    shortcuts.enable(["a", "b"])
    for i in range(4):
        ctx = IterContext(None, i)
        for task in tasks:
            shortcuts.run(task, ctx)
        assert torch.equal(ctx.y, x(2))


# -------------------------------------------------------------------------------- io


class Outside:
    """State outside the context, with its declaration."""

    def __init__(self) -> None:
        self.buffer: dict[str, Any] = {}
        self.io = DeclaredIO(
            capture=lambda: dict(self.buffer), restore=lambda state: self.buffer.update(state)
        )


def test_declared_state_is_captured_and_restored() -> None:
    """It is what the task did outside of its context, in the order of its io."""
    outside = Outside()
    order: list[int] = []

    def fill(ctx: Any) -> None:
        outside.buffer["emb"] = x(5)
        outside.buffer["n"] = 3

    io = [DeclaredIO(capture=lambda k=k: k, restore=order.append) for k in range(3)]
    shortcut = Shortcut(fill, [outside.io, *io])
    shortcut()
    for _ in range(2):
        outside.buffer.clear()
        shortcut()
        assert torch.equal(outside.buffer["emb"], x(5))
        assert outside.buffer["n"] == 3
    assert shortcut.runs == 1
    assert order == [0, 1, 2] * 2


def test_state_that_required_grad_is_grafted_with_the_attributes() -> None:
    """A backward from restored state continues to the upstream tensors as well."""
    outside = Outside()
    shortcut = Shortcut(lambda ctx: outside.buffer.update(emb=ctx.x * 2), [outside.io])
    shortcut(x=weight())
    upstream = weight()
    shortcut(x=upstream)
    outside.buffer["emb"].sum().backward()
    assert torch.equal(upstream.grad, x(0))


def test_a_failing_capture_or_restore_names_task_and_io() -> None:
    """The failure is unchanged, with a note; after a failed capture there is no cache."""

    def fail(*state: Any) -> None:
        raise KeyError("buffer")

    fine = DeclaredIO(lambda: None, lambda _: None)
    for name, io, runs in (
        ("capture", DeclaredIO(fail, lambda _: None), 2),
        ("restore", DeclaredIO(lambda: None, fail), 1),
    ):
        shortcut = Shortcut(assign(), [fine, io])
        if name == "restore":
            shortcut()
        for _ in range(2):
            with pytest.raises(KeyError, match="buffer") as failure:
                shortcut()
            assert failure.value.__notes__ == [f"swpipe: in the {name} of io[1] of task 't'"]
        assert shortcut.runs == runs


# -------------------------------------------------------------------------- autograd


def test_upstream_parameters_get_zeros_and_downstream_ones_what_they_would_have_got() -> None:
    """Upstream parameters stay in the graph; a gradient downstream depends on values only.

    Inputs deep in containers count as well as plain ones.
    """

    def mix(ctx: Any) -> None:
        ctx.y = ctx.x * ctx.a["k"][0] * ctx.b.dense

    shortcut = Shortcut(mix)
    for expected in (x(24), x(0)):
        leaves = [weight() for _ in range(3)]
        first, second, third = (leaf * 1 for leaf in leaves)
        head = weight(6)
        ctx = shortcut(x=first, a={"k": [second]}, b=Batch(third, {}))
        (ctx.y * head).sum().backward()
        assert all(torch.equal(leaf.grad, expected) for leaf in leaves)
        assert torch.equal(head.grad, x(8))
    assert shortcut.runs == 1


def test_unused_inputs_get_no_gradient() -> None:
    """Connecting to them could run a graph that another backward has freed."""
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", ctx.used * 2))
    for _ in range(2):
        used, unused = weight(), weight()
        done = unused.exp()
        done.sum().backward()
        unused.grad = None
        ctx = shortcut(used=used * 1, loss=done)
        ctx.y.sum().backward()
        assert unused.grad is None
    assert torch.equal(used.grad, x(0))


def test_outputs_keep_their_own_need_for_grad() -> None:
    """Integers, masks and detached outputs have none; unused ones keep no zeros from upstream."""

    def mixed(ctx: Any) -> None:
        ctx.y = [ctx.x * 2, (ctx.x * 2).double(), ctx.x.detach(), ctx.x > 1, torch.arange(3)]

    w = weight()
    back = Shortcut(mixed).twice(lambda: {"x": w * 1}).y
    assert [t.requires_grad for t in back] == [True, True, False, False, False]
    assert [t.dtype for t in back][:2] == [torch.float, torch.double]
    back[1].sum().backward()
    assert torch.equal(w.grad, x(0))


def test_an_output_requires_grad_though_no_upstream_does() -> None:
    """The task's own module caused it; downstream backward finds a graph."""
    module = torch.nn.Linear(3, 3)
    ctx = Shortcut(lambda ctx: setattr(ctx, "y", module(ctx.x))).twice(lambda: {"x": x()})
    assert ctx.y.requires_grad
    assert not ctx.y.is_leaf
    ctx.y.sum().backward()
    assert module.weight.grad is None


def test_upstream_may_change_between_replays() -> None:
    """A shorter last batch gets zeros of its own length; an input that is gone is left out."""
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", ctx.x.sum() * weight().sum()))
    for length in (3, 3, 2, 5):
        w = torch.ones(length, requires_grad=True)
        shortcut(x=w * 1).y.backward()
        assert w.grad is not None
        assert len(w.grad) == length
    assert shortcut().y.requires_grad
    assert shortcut(x=x()).y.requires_grad


def test_a_leaf_comes_back_as_a_leaf() -> None:
    """If a graph is cut in two, downstream backward leaves its gradient in .grad."""

    def cut(ctx: Any) -> None:
        ctx.y = ctx.x.detach().requires_grad_()

    w = weight()
    shortcut = Shortcut(cut)
    for _ in range(3):
        ctx = shortcut(x=w * 1)
        assert ctx.y.is_leaf
        (ctx.y * 3).sum().backward()
        assert torch.equal(ctx.y.grad, x(3))
        assert w.grad is None
    assert shortcut.runs == 1


def test_a_leaf_handed_on_is_no_input_of_the_other_outputs() -> None:
    """It gets no gradient through them, in replay as in the run."""

    def hand_on(ctx: Any) -> None:
        ctx.alias, ctx.y = ctx.leaf, ctx.x * 2

    shortcut = Shortcut(hand_on)
    for _ in range(2):
        leaf = weight()
        shortcut(leaf=leaf, x=weight() * 1).y.sum().backward()
        assert leaf.grad is None


def test_inputs_that_need_no_gradient_get_no_zeros() -> None:
    """For a container with ids and embeddings, only what requires grad joins the graph."""
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", ctx.x[0] * 2))
    for _ in range(2):
        ctx = shortcut(x=[weight() * 1, torch.arange(3), x()])
    assert len(ctx.y.grad_fn.next_functions) == 2  # the kept tensor and one upstream


def test_gradients_that_the_task_left_come_back() -> None:
    """A replayed backward leaves the .grad of the context's leaves, a fresh copy each time."""
    shortcut = Shortcut(lambda ctx: (ctx.leaf * 3).sum().backward())
    for _ in range(3):
        ctx = shortcut(leaf=weight())
        assert torch.equal(ctx.leaf.grad, x(3))
        (ctx.leaf * 2).sum().backward()
        assert torch.equal(ctx.leaf.grad, x(5))
    assert shortcut.runs == 1


def test_a_retained_gradient_is_retained_in_replay() -> None:
    """An output that retained its gradient does so again."""

    def keep(ctx: Any) -> None:
        ctx.y = ctx.x * 2
        ctx.y.retain_grad()

    ctx = Shortcut(keep).twice(lambda: {"x": weight() * 1})
    (ctx.y * 3).sum().backward()
    assert torch.equal(ctx.y.grad, x(3))


def test_replayed_tasks_in_a_row_stay_connected() -> None:
    """Each is grafted onto the previous one, also if it modifies that one in place."""
    shortcuts = Shortcuts()
    tasks = [
        PipelineTask("a", lambda ctx: setattr(ctx, "y", ctx.x * 2)),
        PipelineTask("b", lambda ctx: ctx.y.mul_(3)),
        PipelineTask("c", lambda ctx: setattr(ctx, "z", ctx.y * 1)),
    ]
    shortcuts.enable(["a", "b", "c"])
    for expected in (x(6), x(0)):
        w = weight()
        ctx = SimpleNamespace(x=w * 1)
        for task in tasks:
            shortcuts.run(task, ctx)
        ctx.z.sum().backward()
        assert torch.equal(w.grad, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_on_and_off_have_caches_of_their_own(mode: Any) -> None:
    """With grad mode off, outputs are plain, and do not cut the graph in training.

    The graph of an inner tensor that is passed on cannot be restored there; its values can.
    """
    shortcut = Shortcut(lambda ctx: setattr(ctx, "y", [ctx.x * 2, ctx.inner]))
    inner = weight() * 2
    inner.retain_grad()
    with mode():
        shortcut(x=x(2), inner=inner)
        back = shortcut(x=x(2), inner=inner).y
    assert not any(tensor.requires_grad for tensor in back)
    assert torch.equal(back[0], x(4))
    assert torch.equal(back[1], inner)
    assert shortcut.runs == 1
    for _ in range(2):
        assert shortcut(x=weight() * 1, inner=inner).y[0].requires_grad
    assert shortcut.runs == 2


# --------------------------------------------------------------------------- threads


def test_a_cache_made_across_a_disabling_is_dropped() -> None:
    """A run that began before the task was disabled leaves no cache to the next enabling."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(ctx: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        ctx.y = x()

    shortcut = Shortcut(slow)
    worker = threading.Thread(target=shortcut)
    worker.start()
    assert inside.wait(60)
    shortcut.shortcuts.disable(["t"])
    shortcut.shortcuts.enable(["t"])
    go_on.set()
    worker.join(10)
    shortcut()
    assert shortcut.runs == 2
    shortcut()
    assert shortcut.runs == 2


def test_what_another_task_sets_meanwhile_is_not_kept() -> None:
    """Two tasks without an order run on one context; each replay restores its own outputs."""
    shortcuts = Shortcuts()
    inside, go_on = threading.Event(), threading.Event()

    def mine(ctx: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        ctx.mine = x(5)

    task = PipelineTask("t", mine)
    shortcuts.enable(["t"])
    for i in range(2):
        ctx = IterContext(None, i)
        ctx.old = 1
        worker = threading.Thread(target=shortcuts.run, args=(task, ctx))
        worker.start()
        assert inside.wait(60)
        ctx.theirs = i
        del ctx.old
        go_on.set()
        worker.join(10)
        assert vars(ctx).keys() == {"batch", "iter_idx", "mine", "theirs"}
        assert ctx.theirs == i
    kept = IterContext(None, 2)
    kept.old = 1
    shortcuts.run(task, kept)
    assert vars(kept).keys() == {"batch", "iter_idx", "old", "mine"}


def test_tasks_run_at_once_while_others_are_enabled() -> None:
    """Threads replay their own tasks while the caller enables and disables; outputs stay right."""
    shortcuts = Shortcuts()
    tasks = [PipelineTask(f"t{k}", lambda ctx, k=k: setattr(ctx, "y", x(k))) for k in range(3)]
    wrong: list[str] = []
    barrier = threading.Barrier(len(tasks) + 1, timeout=60)

    def work(k: int) -> None:
        barrier.wait()
        for _ in range(200):
            ctx = SimpleNamespace()
            shortcuts.run(tasks[k], ctx)
            if not torch.equal(ctx.y, x(k)):
                wrong.append(tasks[k].name)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(tasks))]
    for thread in threads:
        thread.start()
    barrier.wait()
    for _ in range(100):
        shortcuts.enable(task.name for task in tasks)
        shortcuts.disable(task.name for task in tasks[1:])
    for thread in threads:
        thread.join(10)
    assert wrong == []
    assert shortcuts.names == {"t0"}


# ----------------------------------------------------------------------- in a pipeline


class Counted(Loop):
    """A loop that counts the runs of its tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()
        self.order: list[str] = []

    @property
    def tasks(self) -> list[PipelineTask]:
        return [
            replace(task, fn=partial(self._count, task), io=self._note(task.name))
            for task in super().tasks
        ]

    def _count(self, task: PipelineTask, ctx: IterContext) -> None:
        self.runs[task.name] += 1
        if task.name in ORDERED:
            self.order.append(task.name)
        task.fn(ctx)

    def _note(self, name: str) -> Sequence[DeclaredIO]:
        note = DeclaredIO(lambda: None, lambda _: self.order.append(name))
        return [note] if name in ORDERED else []


BATCHES = [torch.tensor([i, 7 - i]) for i in range(6)]
ORDERED = ("embed", "backward")
PIPED = PipelinePlan(
    {
        "embed": TaskSchedule(thread_group="io", globally_ordered=True),
        "forward": TaskSchedule(1),
        "backward": TaskSchedule(1, globally_ordered=True),
        "step": TaskSchedule(1),
    },
    deps=[("forward", "embed"), ("backward", "forward"), ("step", "backward")],
    cross_iter_deps=[("embed", "step")],
    pipeline_depth=4,
)
PRODUCED = {"embed": "rows", "forward": "loss"}


@pytest.mark.parametrize("plan", [PipelinePlan.serial(Counted().tasks), PIPED])
@pytest.mark.parametrize("name", NAMES)
def test_any_task_of_a_pipeline_can_be_shortcut(plan: PipelinePlan, name: str) -> None:
    """It runs once; from then on its outputs are the cached run's, and all other tasks run."""
    loop = Counted()
    with SWPipeline(plan, loop.tasks) as pipe, pipe.shortcut(name):
        done = list(pipe.iterate(BATCHES))
    assert loop.runs == {**dict.fromkeys(NAMES, 6), name: 1}
    if name in PRODUCED:
        values = [getattr(ctx, PRODUCED[name]) for ctx in done]
        assert all(torch.equal(value, values[0]) for value in values)
        assert all(value.requires_grad for value in values)


def test_shortcuts_may_change_with_iterations_in_flight() -> None:
    """Each batch is still returned once."""
    loop, batches = Counted(), iter(BATCHES)
    with SWPipeline(PIPED, loop.tasks) as pipe:
        pipe.progress(batches)
        pipe.enable_shortcut("forward", "embed")
        pipe.progress(batches)
        pipe.progress(batches)
        pipe.disable_shortcut("forward")
        assert [ctx.iter_idx for ctx in pipe.iterate(batches)] == [3, 4, 5]
    assert loop.runs["forward"] == 1 + 1 + 3
    assert loop.runs["embed"] < 6
    assert loop.runs["backward"] == 6


def test_a_globally_ordered_task_takes_its_turn_when_replayed() -> None:
    """The order among globally ordered tasks is the same with and without shortcuts."""
    orders = []
    for shortcut in ([], ["embed"], ORDERED):
        loop = Counted()
        with SWPipeline(PIPED, loop.tasks) as pipe, pipe.shortcut(*shortcut):
            pipe.run(BATCHES)
        orders.append(loop.order)
    assert orders[0] == orders[1] == orders[2]


def test_a_pipeline_checks_its_shortcuts() -> None:
    """No replay follows the last iterations: the caller can ask for the check."""
    tasks = [
        PipelineTask("view", lambda ctx: setattr(ctx, "rows", ctx.batch[1:])),
        PipelineTask("modify", lambda ctx: ctx.batch.add_(1)),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        with pipe.shortcut("modify"):
            pipe.run([x(), x(), x()])
            pipe.check_shortcuts()
        with pipe.shortcut("view"):
            pipe.run([x(), x()])
            with pytest.raises(ShortcutError, match="'view' cannot be replayed") as caught:
                pipe.check_shortcuts()
    assert caught.value.task == "view"

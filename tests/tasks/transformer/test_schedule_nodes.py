"""Nodes: detached inputs, gradients in and out, and nothing held afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.tasks.transformer import (
    NoopScheduleNode,
    ScheduleNode,
    TransformerLayerNode,
    TransformerModelChunkSchedulePlan,
    get_comm_stream,
    get_comp_stream,
    set_streams,
    training_pipeline,
)
from swpipe.tasks.transformer.weight_gradients import Linear
from tests.tasks.transformer.models import GRAD, microbatch, model, plan_of

run = TransformerModelChunkSchedulePlan.run


def test_a_node_has_a_graph_of_its_own() -> None:
    """Forward returns the outputs; backward the gradients of inputs, None where none is needed."""
    weight = nn.Parameter(torch.tensor([3.0]))
    node = ScheduleNode(lambda x, y, n: (x * y * weight, y + n), None, None)
    before = torch.tensor([2.0], requires_grad=True) * 1
    product, added = node.forward((before, torch.tensor([5.0]), 7))
    assert (product.item(), added.item()) == (30.0, 12.0)
    assert product.requires_grad
    assert not added.requires_grad
    grads = node.backward((torch.tensor([1.0]), None))
    assert grads[0].item() == 15.0
    assert grads[1:] == (None, None)
    assert weight.grad is not None
    assert weight.grad.item() == 10.0
    assert before.grad_fn is not None  # the graph before it is as it was


def test_a_backward_function_takes_the_place_of_autograds() -> None:
    """It gets the outputs and their gradients."""
    seen: list[Any] = []
    node = ScheduleNode(lambda x: x * 2, None, None, backward_func=lambda *both: seen.append(both))
    out = node.forward(torch.tensor([1.0], requires_grad=True))
    grad = torch.tensor([4.0])
    assert node.backward(grad) is None
    assert seen == [((out,), (grad,))]


def test_the_memory_of_inputs_is_freed_where_asked_for() -> None:
    """``free_input`` leaves the input without storage."""
    given = torch.ones(8)
    node = ScheduleNode(lambda x: x + 1, None, None, free_input=True)
    assert node.forward(given).sum().item() == 16.0
    assert given.untyped_storage().size() == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda node: node.backward(torch.ones(1)), "'double' has no forward to run backward"),
        (lambda node: (node.forward(torch.ones(1)), node.forward(torch.ones(1))), "not backward"),
        (
            lambda node: (
                node.forward(torch.ones(1, requires_grad=True)),
                node.backward(torch.ones(1)),
                node.backward(torch.ones(1)),
            ),
            "run backward or released since",
        ),
    ],
)
def test_a_node_is_run_forward_and_then_backward(wrong: Any, message: str) -> None:
    """Anything else is refused, with the node's name."""
    with pytest.raises(RuntimeError, match=message):
        wrong(ScheduleNode(lambda x: x * 2, None, None, name="double"))


def test_a_node_wants_a_gradient_for_each_output() -> None:
    """One too many is refused."""
    node = ScheduleNode(lambda x: x * 2, None, None)
    node.forward(torch.ones(1, requires_grad=True))
    with pytest.raises(ValueError, match="1 outputs, and 2 gradients"):
        node.backward((torch.ones(1), torch.ones(1)))


class Recorder:
    """A stream or an event that writes down what is asked of it."""

    device = torch.device("cpu")

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def wait(self, stream: Any) -> None:
        self.told.append("wait")

    def record(self, stream: Any) -> None:
        self.told.append("record")


def test_a_node_runs_on_its_stream_between_wait_and_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may be a function; the work is between the event's wait and its record."""
    told: list[str] = []

    class OneDevice:
        has_streams = False

        @contextmanager
        def on(self, stream: Any) -> Iterator[None]:
            told.append("on")
            yield

    monkeypatch.setattr("swpipe.tasks.transformer.schedule_node.resolve", lambda _: OneDevice())
    stream = Recorder(told)
    node = ScheduleNode(lambda x: told.append("work") or x * 2, lambda: stream, stream)  # type: ignore[arg-type, return-value]
    node.forward(torch.ones(1, requires_grad=True))
    assert told == ["on", "wait", "work", "record"]
    node.backward(torch.ones(1))
    assert told[4:] == ["on", "wait", "record"]


def test_what_a_node_is_given_is_held_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and gradients may have been made on another one."""
    held: list[Any] = []

    class OneDevice:
        has_streams = True

        def current_stream(self) -> str:
            return "here"

        def hold(self, values: list[Tensor], streams: list[str]) -> None:
            held.append((*values, *streams))

    monkeypatch.setattr("swpipe.tasks.transformer.schedule_node.resolve", lambda _: OneDevice())
    node = ScheduleNode(lambda x: x * 2, None, None)
    given, grad = torch.ones(1, requires_grad=True), torch.ones(1)
    node.forward(given)
    node.backward(grad)
    assert [(one[0] is given or one[0] is grad, one[1]) for one in held] == [(True, "here")] * 2


def test_streams_of_schedules_can_be_set() -> None:
    """On a CPU there are none by default."""
    assert get_comp_stream() is None
    if not torch.accelerator.is_available():
        assert get_comm_stream() is None
    one, other = torch.Stream(device="cpu"), torch.Stream(device="cpu")
    set_streams(one, other)
    try:
        assert (get_comp_stream(), get_comm_stream()) == (one, other)
    finally:
        set_streams()


def test_a_noop_hands_on_what_it_gets() -> None:
    """Forward, backward, and no weight gradients."""
    node, value = NoopScheduleNode(), torch.ones(1)
    assert node.forward(value) is value
    assert node.backward(value) is value
    node.backward_dw()


def _layer_node(linear: nn.Module, extra: dict[str, Any], called: list[str]) -> Any:
    def forward(node: TransformerLayerNode, x: Tensor) -> Tensor:
        return linear(x)

    done = lambda: called.append("dw")  # noqa: E731 - a function to be called
    return TransformerLayerNode(
        None, None, None, object(), forward, bwd_dw_callables=done, extra_args=extra
    )


def test_weight_gradients_wait_for_backward_dw() -> None:
    """Backward gives the input's gradient alone; the arguments were copied; hooks are called."""
    linear, called = Linear(3, 2), ["hooks:"]
    linear.weight.register_post_accumulate_grad_hook(lambda _: called.append("weight"))
    extra = {"delay_wgrad_compute": True}
    node = _layer_node(linear, extra, called)
    extra["delay_wgrad_compute"] = False
    assert node.extra_args == {"delay_wgrad_compute": True}
    x = torch.randn(4, 3, requires_grad=True)
    node.forward(x)
    grad = node.backward(torch.ones(4, 2))
    assert linear.weight.grad is None
    assert linear.bias.grad is None
    node.backward_dw()
    assert called == ["hooks:", "weight", "dw"]
    twin = nn.Linear(3, 2)
    twin.load_state_dict(linear.state_dict())
    twin(x).backward(torch.ones(4, 2))
    assert torch.equal(grad, x.grad)
    assert torch.equal(linear.weight.grad, twin.weight.grad)
    assert torch.equal(linear.bias.grad, twin.bias.grad)


def test_frozen_weights_get_no_delayed_gradient() -> None:
    """The others of the layer do."""
    linear = Linear(3, 2)
    linear.weight.requires_grad_(False)
    node = _layer_node(linear, {"delay_wgrad_compute": True}, [])
    node.forward(torch.randn(4, 3))
    assert node.backward(torch.ones(4, 2)) is None
    node.backward_dw()
    assert linear.weight.grad is None
    assert torch.equal(linear.bias.grad, torch.full((2,), 4.0))


def test_a_weight_that_has_changed_before_backward_is_refused() -> None:
    """As autograd refuses it where weight gradients are not delayed."""
    linear = Linear(3, 2)
    node = _layer_node(linear, {"delay_wgrad_compute": True}, [])
    node.forward(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        linear.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="step the optimizer when no microbatch is in flight"):
        node.backward(torch.ones(4, 2))


# ------------------------------------------------------------------------------------ memory


MODEL = {"mtp_num_layers": 1, "moe_shared_expert_size": 24, "delay_wgrad_compute": True}


def _tensors() -> int:
    gc.collect()
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


def test_nothing_outlives_release_state() -> None:
    """Neither nodes nor state nor activations, while the plan and its output are held."""
    of = model("moe", "dense", **MODEL)
    gc.collect()
    gc.disable()  # what is in a cycle would stay
    try:
        plan = plan_of(of, 0)
        layers = [plan.get_layer(i) for i in range(plan.num_layers())]
        nodes = [node for layer in layers for node in layer.nodes]
        held = [weakref.ref(one) for one in (plan.state, plan.pre_process, *layers, *nodes)]
        output = run(plan, None)
        held += [weakref.ref(t) for n in nodes for t in getattr(n, "_inputs", ()) if t is not None]
        held += [weakref.ref(t) for n in nodes for t in (getattr(n, "_outputs", ()) or ())]
        assert len(held) > 40
        del layers, nodes
        plan.release_state()
        assert [ref() for ref in held if ref() is not None] == []
        assert output.shape == GRAD.shape
    finally:
        gc.enable()
    assert (plan.num_layers(), plan.state) == (0, None)


def test_nodes_that_somebody_holds_hold_nothing_after_a_release() -> None:
    """Neither inputs, nor what they have detached, nor weight gradients that were delayed."""
    plan = plan_of(model("moe", **MODEL), 0)
    nodes = [node for layer in plan.layers for node in layer.nodes]
    run(plan, None)
    detached = [pair[1] for node in nodes for pair in getattr(node, "_detached", ())]
    held = [weakref.ref(leaf) for leaf in detached]
    assert len(held) > 4
    del detached
    plan.release_state()
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


def test_a_plan_run_backward_holds_nothing() -> None:
    """``run`` releases it, whoever else still refers to it."""
    of = model("moe", **MODEL)
    plan = plan_of(of, 0)
    run(plan, None)
    held = weakref.ref(plan.state)
    run(None, plan, GRAD)
    gc.collect()
    assert held() is None
    assert plan.num_layers() == 0


def _pairs(of: Any, steps: int) -> None:
    before = plan_of(of, 0)
    run(before, None)
    for number in range(1, steps):
        plan = plan_of(of, number)
        run(plan, before, GRAD)
        before = plan
    run(None, before, GRAD)


def test_tensors_do_not_pile_up() -> None:
    """After 200 pairs, and 200 steps of training, there are as many as after a few."""
    of = model("moe", delay_wgrad_compute=True)
    with training_pipeline(of, check_effects=False) as pipeline:
        for steps in (3, 200):
            _pairs(of, steps)
            for _ in pipeline.iterate(map(microbatch, range(steps))):
                pass
            counted = _tensors()
            if steps == 3:
                first = counted
    assert counted == first

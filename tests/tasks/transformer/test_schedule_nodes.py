"""Nodes: detached inputs, gradients in and out, and no memory held afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from swpipe.tasks.transformer.layer_schedule import ExchangeNode
from swpipe.tasks.transformer.weight_gradients import Linear
from tests.tasks.transformer.models import GRAD, microbatch, model, plan_of, run_pairs

run = TransformerModelChunkSchedulePlan.run


def doubling() -> ScheduleNode:
    """Return a node that doubles."""
    return ScheduleNode(lambda x: x * 2, None, None, name="double")


def test_a_node_has_a_graph_of_its_own() -> None:
    """Forward returns the outputs; backward the gradients of inputs, or None."""
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


def test_a_noop_hands_on_what_it_is_given() -> None:
    """It passes values forward and gradients backward; it delays nothing."""
    noop = NoopScheduleNode()
    value = torch.ones(1)
    assert noop.forward(value) is noop.backward(value) is value
    noop.backward_dw()


def test_a_node_is_run_forward_and_then_backward() -> None:
    """Any other order is refused, with the node's name; each output needs a gradient."""
    one = torch.ones(1, requires_grad=True)
    for calls, told in [
        (["backward"], "'double' has no forward to run backward"),
        (["forward", "forward"], "'double' was run forward, and not backward since"),
        (["forward", "backward", "backward"], "run backward or released since"),
    ]:
        node = doubling()
        for call in calls[:-1]:
            getattr(node, call)(one)
        with pytest.raises(RuntimeError, match=told):
            getattr(node, calls[-1])(one)
    node = doubling()
    node.forward(one)
    with pytest.raises(ValueError, match="1 outputs, and 2 gradients"):
        node.backward((one, one))


class Device:
    """A device that is its own stream and event, and records the calls."""

    device = torch.device("cpu")
    has_streams = True

    def __init__(self) -> None:
        self.told: list[Any] = []

    def wait(self, stream: Any) -> None:
        self.told.append("wait")

    def record(self, stream: Any) -> None:
        self.told.append("record")

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.told.append("on")
        yield

    def current_stream(self) -> str:
        return "here"

    def hold(self, values: list[Tensor], streams: list[str]) -> None:
        self.told.append((*values, *streams))


def test_a_node_runs_on_its_stream_between_wait_and_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may be a function; inputs from another stream are held for it."""
    device = Device()
    monkeypatch.setattr("swpipe.tasks.transformer.schedule_node.resolve", lambda _: device)

    def work(x: Tensor) -> Tensor:
        device.told.append("work")
        return x * 2

    node = ScheduleNode(work, lambda: device, device)  # type: ignore[arg-type, return-value]
    given, grad = torch.ones(1, requires_grad=True), torch.ones(1)
    node.forward(given)
    node.backward(grad)
    first, second = (one for one in device.told if isinstance(one, tuple))
    assert first[0] is given
    assert second[0] is grad
    assert first[1] == second[1] == "here"
    assert [one for one in device.told if isinstance(one, str)] == [
        "on", "wait", "work", "record", "on", "wait", "record",
    ]  # fmt: skip


def test_rows_and_gradients_of_other_streams_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rows that an exchange sends, and gradients of detached tensors for other nodes."""
    device = Device()
    monkeypatch.setattr("swpipe.tasks.transformer.schedule_node.resolve", lambda _: device)
    held = device.told
    shared = SimpleNamespace(routing=SimpleNamespace(start=lambda rows, to_experts: "sent"))
    exchange = ExchangeNode(True, None, None, shared, None, lambda node, rows: rows, "dispatch")
    rows = torch.ones(1)
    exchange.start_forward(rows)
    assert held == [(rows, "here")]
    held.clear()
    leaves: list[Tensor] = []

    def attend(node: TransformerLayerNode, x: Tensor) -> Tensor:
        leaves.append(node.detach(x * 3))
        return x * 2

    node = TransformerLayerNode(None, None, None, None, attend)
    given, grad = torch.ones(1, requires_grad=True), torch.ones(1)
    node.run_forward(given)
    leaves[0].grad = torch.full((1,), 5.0)  # as a node on another stream leaves it
    held.clear()
    assert node.run_backward(grad).item() == 2.0 + 3.0 * 5.0
    assert [id(value) for value, _ in held] == [id(grad), id(leaves[0].grad)]


def test_what_a_layer_merges_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are the rows' weights, the shared expert's part and the residual."""
    of = model("moe", moe_shared_expert_size=24)
    merged: list[Any] = []
    held: list[int] = []
    (layer,) = of.decoder_layers
    merge = layer.merge

    def noted(rows: Tensor, *others: Any) -> Tensor:
        monkeypatch.undo()
        merged.extend(others)
        return merge(rows, *others)

    monkeypatch.setattr(layer, "merge", noted)
    monkeypatch.setattr(
        "swpipe.tasks.transformer.layer_schedule.used_here", lambda value: held.append(id(value))
    )
    run(plan_of(of, 0), None)
    *values, routing = merged
    assert len(values) == 3
    assert {id(value) for value in (*values, *routing.tensors)} <= set(held)


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


# --------------------------------------------------------------------- delayed weight gradients


def _layer_node(linear: nn.Module) -> Any:
    def forward(node: TransformerLayerNode, x: Tensor) -> Tensor:
        return linear(x)

    extra = {"delay_wgrad_compute": True}
    node = TransformerLayerNode(None, None, None, object(), forward, extra_args=extra)
    extra["delay_wgrad_compute"] = False
    assert node.extra_args == {"delay_wgrad_compute": True}
    return node


def test_weight_gradients_wait_for_backward_dw() -> None:
    """Backward returns only the input's gradient; hooks are called; all bits are autograd's."""
    linear = Linear(3, 2)
    called: list[str] = []
    linear.weight.register_post_accumulate_grad_hook(lambda _: called.append("weight"))
    node = _layer_node(linear)
    x = torch.randn(4, 3, requires_grad=True)
    node.forward(x)
    grad = node.backward(torch.ones(4, 2))
    assert linear.weight.grad is linear.bias.grad is None
    node.backward_dw()
    assert called == ["weight"]
    twin = nn.Linear(3, 2)
    twin.load_state_dict(linear.state_dict())
    twin(x).backward(torch.ones(4, 2))
    assert torch.equal(grad, x.grad)
    assert torch.equal(linear.weight.grad, twin.weight.grad)
    assert torch.equal(linear.bias.grad, twin.bias.grad)


def test_a_map_that_is_also_recomputed_gets_all_of_its_gradient() -> None:
    """Nobody would later compute what a checkpoint recomputes in backward."""
    linear = Linear(3, 3)

    def forward(node: TransformerLayerNode, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(linear, x, use_reentrant=True)
        return linear(x) + again

    extra = {"delay_wgrad_compute": True}
    node = TransformerLayerNode(None, None, None, None, forward, extra_args=extra)
    x = torch.randn(4, 3, requires_grad=True)
    node.forward(x)
    node.backward(torch.ones(4, 3))
    node.backward_dw()
    twin = nn.Linear(3, 3)
    twin.load_state_dict(linear.state_dict())
    (twin(x) + twin(x)).backward(torch.ones(4, 3))
    torch.testing.assert_close(linear.weight.grad, twin.weight.grad)


def test_frozen_and_changed_weights() -> None:
    """A frozen one gets no delayed gradient, others do; a changed one is refused."""
    linear = Linear(3, 2)
    linear.weight.requires_grad_(False)
    node = _layer_node(linear)
    node.forward(torch.randn(4, 3))
    assert node.backward(torch.ones(4, 2)) is None
    node.backward_dw()
    assert linear.weight.grad is None
    assert torch.equal(linear.bias.grad, torch.full((2,), 4.0))
    node.forward(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        linear.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="step the optimizer when no microbatch is in flight"):
        node.backward(torch.ones(4, 2))


# ------------------------------------------------------------------------------------ memory

MODEL = {"mtp_num_layers": 1, "moe_shared_expert_size": 24, "delay_wgrad_compute": True}


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
        assert len(held) > 30
        del layers, nodes
        plan.release_state()
        assert [ref() for ref in held if ref() is not None] == []
        assert output.shape == GRAD.shape
    finally:
        gc.enable()
    assert (plan.num_layers(), plan.state) == (0, None)


def test_who_holds_nodes_or_a_plan_holds_nothing_after_a_release() -> None:
    """Inputs, detached tensors and delayed gradients are freed; ``run`` releases as well."""
    plan = plan_of(model("moe", **MODEL), 0)
    nodes = [node for layer in plan.layers for node in layer.nodes]
    run(plan, None)
    held = [weakref.ref(pair[1]) for node in nodes for pair in getattr(node, "_detached", ())]
    assert len(held) > 4
    plan.release_state()
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []
    plan = plan_of(model("moe", **MODEL), 0)
    run(plan, None)
    state = weakref.ref(plan.state)
    run(None, plan, GRAD)
    gc.collect()
    assert state() is None
    assert plan.num_layers() == 0


def test_tensors_do_not_pile_up() -> None:
    """After twelve pairs, and twelve steps of training, there are as many as after a few."""
    of, counted = model("moe", delay_wgrad_compute=True), []
    with training_pipeline(of, check_effects=False) as pipeline:
        for steps in (3, 12):
            run_pairs(of, range(steps))
            for _ in pipeline.iterate(map(microbatch, range(steps))):
                pass
            gc.collect()
            counted.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))
    assert counted[0] == counted[1]

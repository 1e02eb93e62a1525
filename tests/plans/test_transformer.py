"""The order in which one microbatch's forward runs over another's backward."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swpipe.analysis.validation import validate
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.plans.transformer import (
    LayerKind,
    LayerStep,
    backward_steps,
    chunk_order,
    forward_steps,
    layer_overlap_plan,
    pair_order,
    paired_plan,
)
from tests.plans.layer_costs import costs

MOE = LayerKind(moe=True, delayed=True)
KINDS = st.lists(st.builds(LayerKind, st.booleans(), st.booleans(), st.booleans()), max_size=6)


def test_a_pair_has_the_order_of_the_seed() -> None:
    """On each stream; the weight gradients of the MLP come before the dispatch of gradients."""
    order = pair_order(
        forward_steps(0, LayerKind(True, True, True)),
        backward_steps(1, LayerKind(True, True, True)),
    )
    comm = [step.name for step in order if step.exchanges and step.part == "start"]
    comp = [step.name for step in order if not step.exchanges]
    assert comm == [
        "b1.moe_combine.start",
        "f0.moe_dispatch.start",
        "b1.moe_dispatch.start",
        "f0.moe_combine.start",
    ]
    assert comp == [
        "b1.mtp_post_process",
        "f0.attn", "f0.post_attn",
        "b1.mlp", "b1.mlp.dw", "f0.mlp",
        "b1.post_attn", "b1.attn", "b1.attn.dw",
        "f0.mtp_post_process",
    ]  # fmt: skip
    names = [step.name for step in order]
    assert names.index("b1.mlp.dw") < names.index("b1.moe_dispatch.start")


@pytest.mark.parametrize("exchange", ["b1.moe_combine", "f0.moe_dispatch", "b1.moe_dispatch"])
def test_work_lies_between_the_start_of_an_exchange_and_its_wait(exchange: str) -> None:
    """So that it overlaps on a device without streams."""
    names = [s.name for s in pair_order(forward_steps(0, MOE), backward_steps(1, MOE))]
    between = names[names.index(f"{exchange}.start") + 1 : names.index(f"{exchange}.wait")]
    assert [name for name in between if "moe" not in name]


def test_the_common_layers_are_paired_and_the_rest_follows() -> None:
    """Layer i of the one with layer last - i of the other; then backward's rest, then forward's."""
    dense = LayerKind()

    def layers(ahead: int, back: int) -> list[str]:
        order = chunk_order([dense] * ahead, [dense] * back)
        return [f"{s.side}{s.layer}" for s in order if s.node == "attn"]

    assert layers(2, 2) == ["f0", "b1", "f1", "b0"]
    assert layers(1, 3) == ["f0", "b2", "b1", "b0"]
    assert layers(3, 1) == ["f0", "b0", "f1", "f2"]


def test_the_first_layers_attention_weights_come_after_gradients_were_sent_on() -> None:
    """And what is around the layers is where the seed has it."""
    order = chunk_order([MOE], [MOE])
    around = [s.name for s in order if s.layer is None or s.name == "b0.attn.dw"]
    assert around == [
        "f.begin", "f.pre_process", "b.begin", "b.post_process",
        "f.post_layers", "b.post_layers", "b0.attn.dw",
        "f.post_process", "f.end", "b.pre_process", "b.end",
    ]  # fmt: skip


@settings(max_examples=40)
@given(KINDS, KINDS, st.booleans())
def test_every_step_is_there_once_after_what_it_needs(
    forward: list[LayerKind], backward: list[LayerKind], hooks: bool
) -> None:
    """For layers of any kinds and any two depths."""
    order = chunk_order(forward, backward, hooks=hooks)
    at = {step: place for place, step in enumerate(order)}
    assert len(at) == len(order)
    chains: list[list[LayerStep]] = [[], []]
    for i, kind in enumerate(forward):
        chains[0] += forward_steps(i, kind)
    for i, kind in reversed([*enumerate(backward)]):
        chains[1] += backward_steps(i, kind)
    around = 5 if hooks else 4
    assert len(order) == sum(map(len, chains)) + 2 * around
    for chain in chains:
        main = [at[step] for step in chain if not step.is_weight_gradient]
        assert main == sorted(main)
        for step in chain:
            if step.is_weight_gradient:
                assert at[step] > at[step._replace(part="")]
    validate(paired_plan(order))
    validate(layer_overlap_plan(forward, shared=hooks))


@pytest.mark.parametrize("shared", [False, True])
def test_shared_parameters_are_added_to_one_microbatch_after_the_other(shared: bool) -> None:
    """Whichever order a planner finds: a backward begins after the one before has ended."""
    carried = layer_overlap_plan([MOE], shared=shared).cross_iter_deps
    assert (("b.begin", "b.end", 1) in carried) == shared


@pytest.mark.parametrize("exchange_us", [500.0, 1000.0, 2000.0])
def test_a_planned_order_is_at_most_as_slow_as_this_one(exchange_us: float) -> None:
    """By the simulator, and both are faster than one task after the other."""
    kinds = [MOE, MOE]
    plan = layer_overlap_plan(kinds)
    model = costs(chunk_order(kinds, kinds, hooks=False), exchange_us)
    by_hand = simulate(plan, model).ii_us
    choice = auto_plan(plan, model, limits=Limits(in_flight=2, threads=1), effort=0.2)
    assert simulate(choice.plan, model).ii_us == pytest.approx(choice.ii_us)
    assert choice.ii_us <= by_hand
    assert by_hand < sum(cost.total_us for cost in model.tasks.values())

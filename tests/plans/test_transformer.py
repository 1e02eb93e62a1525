"""The order in which one microbatch's forward runs over another's backward."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swpipe.analysis.validation import validate
from swpipe.plans.transformer import (
    LayerKind,
    chunk_order,
    layer_overlap_plan,
    layer_steps,
    pair_order,
    paired_plan,
)
from tests.support.budget import examples

ALL = LayerKind(True, True, True)
MOE = LayerKind(moe=True, delayed=True)
KINDS = st.lists(st.builds(LayerKind, *[st.booleans()] * 4), max_size=6)


def test_a_pair_has_the_order_of_the_seed() -> None:
    """This holds on each stream; work lies between the start of an exchange and its wait."""
    order = pair_order(layer_steps("f", 0, ALL), layer_steps("b", 1, ALL))
    assert [step.name for step in order if step.exchanges and step.part == "start"] == [
        "b1.moe_combine.start",
        "f0.moe_dispatch.start",
        "b1.moe_dispatch.start",
        "f0.moe_combine.start",
    ]
    assert [step.name for step in order if not step.exchanges] == [
        "b1.mtp_post_process",
        "f0.attn.route",
        "b1.mlp", "b1.mlp.dw", "f0.mlp",
        "b1.attn", "b1.attn.dw",
        "f0.mtp_post_process",
    ]  # fmt: skip
    names = [step.name for step in order]
    assert names.index("b1.mlp.dw") < names.index("b1.moe_dispatch.start")
    for exchange in ("b1.moe_combine", "f0.moe_dispatch", "b1.moe_dispatch"):
        between = names[names.index(f"{exchange}.start") + 1 : names.index(f"{exchange}.wait")]
        assert [name for name in between if "moe" not in name]


def test_attention_that_frees_its_memory_early_comes_before_the_experts() -> None:
    """The experts may be any layer of the other microbatch; its weight gradients stay late."""
    for kind in (MOE, LayerKind()):
        backward = layer_steps("b", 1, MOE)
        for early in (False, True):
            names = [s.name for s in pair_order(layer_steps("f", 0, kind), backward, early)]
            assert (names.index("b1.attn") < names.index("f0.mlp")) == early
            assert names.index("f0.mlp") < names.index("b1.attn.dw")
    order = [step.name for step in chunk_order([MOE], [replace(MOE, early=True)])]
    assert order.index("b0.attn") < order.index("f0.moe_dispatch.wait")


def order_of(forward: str, backward: str) -> str:
    """Return the order of attention and of the experts' exchanges; layers are "d"ense or "m"oe."""
    kinds = [[LayerKind(moe=one == "m") for one in layers] for layers in (forward, backward)]
    names = {("attn", ""): "", ("attn", "route"): "", ("moe_combine", "start"): "(",
             ("moe_combine", "wait"): ")"}  # fmt: skip
    shown = [s for s in chunk_order(*kinds) if (s.node, s.part) in names]
    return " ".join(f"{s.side}{s.layer}{names[s.node, s.part]}" for s in shown)


def test_layers_with_experts_meet_each_other_and_the_others_fill_their_exchanges() -> None:
    """A forward runs while gradients are combined, a backward while rows are."""
    assert order_of("dm", "dm") == "b1( f0 f1 b1) f1( b1 b0 f1)"
    assert order_of("md", "md") == "b1 b0( f0 b0) f0( b0 f0) f1"
    assert order_of("dmdm", "dmdm") == "b3( f0 f1 b3) f1( b3 b2 f1) b1( f2 f3 b1) f3( b1 b0 f3)"
    assert order_of("mm", "dmd") == "b2 b1( f0 b1) f0( b1 b0 f0) f1 f1( f1)"
    assert order_of("dm", "mmd") == "b2 b1( f0 f1 b1) f1( b1 f1) b0( b0) b0"
    assert order_of("md", "dd") == "f0 f0( b1 f0) f1 b0"


def test_the_common_layers_are_paired_and_the_rest_follows() -> None:
    """Layer i of one meets layer last - i of the other; then backward's rest, then forward's."""
    for counts, wanted in {
        (2, 2): ["f0", "b1", "f1", "b0"],
        (1, 3): ["f0", "b2", "b1", "b0"],
        (3, 1): ["f0", "b0", "f1", "f2"],
    }.items():
        order = chunk_order(*([LayerKind()] * count for count in counts))
        assert [f"{s.side}{s.layer}" for s in order if s.node == "attn"] == wanted


def test_the_first_layers_attention_weights_come_after_gradients_were_sent_on() -> None:
    """The work around the layers is where the published schedule has it."""
    order = chunk_order([MOE], [MOE])
    around = [s.name for s in order if s.layer is None or s.name == "b0.attn.dw"]
    assert around == [
        "f.begin", "f.pre_process", "b.begin", "b.post_process",
        "f.post_layers", "b.post_layers", "b0.attn.dw",
        "f.post_process", "f.end", "b.pre_process", "b.end",
    ]  # fmt: skip


@examples("schedules", 25)
@given(KINDS, KINDS, st.booleans())
def test_every_step_is_there_once_after_what_it_needs(
    forward: list[LayerKind], backward: list[LayerKind], hooks: bool
) -> None:
    """This holds for layers of any kinds and any two depths; and the plans can run."""
    order = chunk_order(forward, backward, hooks=hooks)
    at = {step: place for place, step in enumerate(order)}
    chains = [
        [step for i, kind in enumerate(forward) for step in layer_steps("f", i, kind)],
        [
            step
            for i, kind in reversed([*enumerate(backward)])
            for step in layer_steps("b", i, kind)
        ],
    ]
    assert len(at) == len(order) == sum(map(len, chains)) + 2 * (5 if hooks else 4)
    for chain in chains:
        main = [at[step] for step in chain if not step.is_weight_gradient]
        assert main == sorted(main)
        for step in chain:
            if step.is_weight_gradient:
                assert at[step] > at[step._replace(part="")]
    validate(paired_plan(order))
    validate(layer_overlap_plan(forward, shared=hooks))


def test_backward_steps_follow_those_of_the_microbatch_before() -> None:
    """Each follows itself in any planner's order: gradients are added up in one order."""
    plan = layer_overlap_plan([MOE])
    back = {name for name in plan.schedule if name.startswith("b")}
    assert {(name, name, 1) for name in back} <= {*plan.cross_iter_deps}
    assert not any(consumer.startswith("f") for consumer, _, _ in plan.cross_iter_deps)


def test_what_starts_exchanges_takes_turns() -> None:
    """These are the counts of the router's rows, and the rows, forward and back; nothing else."""
    plan = layer_overlap_plan([MOE])
    ordered = {name for name, entry in plan.schedule.items() if entry.globally_ordered}
    exchanges = {f"{side}0.moe_{way}.start" for side in "fb" for way in ("dispatch", "combine")}
    assert ordered == {"f0.attn.route", *exchanges}


def test_shared_parameters_are_added_to_one_microbatch_after_the_other() -> None:
    """This holds for any planner's order: a backward begins after the previous one has ended."""
    for shared in (False, True):
        carried = layer_overlap_plan([MOE], shared=shared).cross_iter_deps
        assert (("b.begin", "b.end", 1) in carried) == shared

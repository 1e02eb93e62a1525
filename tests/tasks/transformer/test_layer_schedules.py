"""Schedules of layers give the numbers of plain autograd, bit for bit, on one and two ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docs.examples.moe_gpt import GPTModel, MoeTransformerLayer, TransformerLayer
from swpipe.tasks.transformer import (
    AbstractSchedulePlan,
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
    training_pipeline,
)
from tests.support.ranks import Ranks
from tests.tasks.transformer.models import (
    GRAD,
    config,
    differing,
    microbatch,
    model,
    plan_of,
    run_alone,
    run_pairs,
    run_plain,
    same,
)

run = TransformerModelChunkSchedulePlan.run
MOE: dict[str, Any] = {"moe_shared_expert_size": 24}
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "mixed": (("dense", "moe", "moe", "dense"), MOE),
    "early": (("moe", "dense", "moe"), {"ep_overlap_early_attn_memory_release": True, **MOE}),
}
"""Models whose steps have their own parameters."""

SHARING: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "mtp": (("moe",), {"mtp_num_layers": 1, "mtp_layer_type": "moe", **MOE}),
    "tied, two mtp": (("moe",), {"mtp_num_layers": 2, "tie_embeddings": True}),
}
"""Models of which several steps use the embedding or the output layer."""

ON_TWO_RANKS = (("mixed", True), ("tied, two mtp", False))

SHARED_NAMES = {"word.weight", "position.weight", "output_layer.weight"}


def _group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _compared(name: str, delayed: bool) -> dict[str, list[str]]:
    """Return the differences from plain autograd, or from separate nodes, of each way to run."""
    types, more = {**MODELS, **SHARING}[name]
    more = {**more, "group": _group(), "delay_wgrad_compute": delayed}
    plain, alone, paired, trained = (model(*types, **more) for _ in range(4))
    numbers = [0, 1, 2]
    expected = run_plain(plain, numbers)
    outputs = {"alone": run_alone(alone, numbers), "paired": run_pairs(paired, numbers)}
    with training_pipeline(trained) as pipeline:
        losses = [ctx.loss for ctx in pipeline.iterate(map(microbatch, numbers))]
    outputs["trained"] = losses
    found = {}
    for way, of in (("alone", alone), ("paired", paired), ("trained", trained)):
        wanted = [e.mean() for e in expected] if way == "trained" else expected
        wrong = [f"output {n}" for n in numbers if not same(outputs[way][n], wanted[n])]
        found[way] = wrong + differing(of, plain)
        found[f"{way}, beside alone"] = wrong + differing(of, alone)
    far = [
        key
        for key, p in plain.named_parameters()
        if not torch.allclose(p.grad, paired.get_parameter(key).grad, rtol=1e-4, atol=1e-7)
    ]
    return {**found, "far": far}


def _check(name: str, found: dict[str, list[str]]) -> None:
    assert found["far"] == []
    for way in ("alone", "paired", "trained"):
        assert found[f"{way}, beside alone"] == []
        if name in MODELS:
            assert found[way] == []
        else:
            assert set(found[way]) <= SHARED_NAMES


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("name", [*MODELS, *SHARING])
def test_the_numbers_are_those_of_plain_autograd(name: str, delayed: bool) -> None:
    """Outputs and gradients are equal bit for bit.

    A parameter that several steps use gets its gradients in a different order: they equal those of
    the same nodes run serially, and are close to plain autograd's.
    """
    _check(name, _compared(name, delayed))


def _all_compared() -> dict[tuple[str, bool], dict[str, list[str]]]:
    return {(name, delayed): _compared(name, delayed) for name, delayed in ON_TWO_RANKS}


def test_on_two_ranks_too(two_ranks: Ranks) -> None:
    """The ranks have other microbatches, and half of the experts each."""
    for found in two_ranks.run(_all_compared):
        for (name, _), one in found.items():
            _check(name, one)


def test_a_subclass_may_replace_a_node() -> None:
    """It overrides ``_build_callable_nodes``; ``post_attn`` hands on its input."""
    made: list[str] = []

    class Noted(TransformerLayerSchedulePlan):
        def _build_callable_nodes(self, *given: Any) -> None:
            super()._build_callable_nodes(*given)
            own = self.mlp.forward_func
            self.mlp.forward_func = lambda *inputs: (made.append("mlp"), own(*inputs))[1]

    chunk, hidden = model("dense"), torch.ones(2, 3, 16)
    given = chunk.layers["0"], None, SimpleNamespace(), None, None
    noted, plan = Noted(*given), TransformerLayerSchedulePlan(*given)
    found, _ = Noted.run(noted, None, hidden)
    wanted, _ = TransformerLayerSchedulePlan.run(plan, None, hidden)
    assert same(found, wanted)
    assert made == ["mlp"]
    assert plan.post_attn.forward(hidden) is hidden


DEPTHS = [(1, 2), (3, 1), (0, 2), (2, 0)]


def _of_depths(depths: tuple[int, int]) -> list[list[str]]:
    """Return the differences from plain autograd of chunks with different depths."""
    of = config(*("moe", "dense", "moe")[: max(sum(depths), 1)], **MOE)
    total = of.num_layers

    def chunks() -> list[GPTModel]:
        return [
            GPTModel(of, range(depths[0]), expert_group=_group()),
            GPTModel(of, range(total - depths[1], total), expert_group=_group()),
        ]

    plain, ours = chunks(), chunks()
    expected = [run_plain(chunk, [number]) for number, chunk in enumerate(plain)]
    back = plan_of(ours[1], 1)
    outputs = [[run(back, None)]]
    ahead = plan_of(ours[0], 0)
    outputs.insert(0, [run(ahead, back, GRAD)])
    run(None, ahead, GRAD)
    return [
        [*([] if same(got[0], wanted[0]) else ["output"]), *differing(one, other)]
        for got, wanted, one, other in zip(outputs, expected, ours, plain, strict=True)
    ]


def test_chunks_of_unequal_depths(two_ranks: Ranks) -> None:
    """The common layers are paired, the rest of either follows; on one rank and on two."""
    for depths in DEPTHS:
        assert _of_depths(depths) == [[], []]
    assert two_ranks.run(_of_depths, DEPTHS[0]) == [[[], []]] * 2


def test_a_chunk_between_others_passes_hidden_states_and_gradients_on() -> None:
    """Hooks get the stage and, where values are sent on, these values."""
    chunk = GPTModel(config("dense", "moe"), pre_process=False, post_process=False, vp_stage=3)
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = chunk(hidden)
    grad = torch.ones_like(expected)
    (wanted,) = torch.autograd.grad(expected, hidden, grad)
    plans = [chunk.build_schedule_plan(None, decoder_input=hidden) for _ in range(2)]
    run(plans[0], None)
    told: list[Any] = []
    run(
        plans[1],
        plans[0],
        grad,
        pre_forward=lambda stage: told.append(("pre_forward", stage)),
        pre_backward=lambda stage: told.append(("pre_backward", stage)),
        post_forward=lambda value, stage: told.append(("post_forward", stage, value)),
        post_backward=lambda value, stage: told.append(("post_backward", stage, value)),
    )
    names = ("pre_forward", "pre_backward", "post_forward", "post_backward")
    assert [one[:2] for one in told] == [(name, 3) for name in names]
    assert same(told[2][2], expected)
    assert same(told[3][2], wanted)


@pytest.mark.parametrize("last", [False, True])
def test_one_layer_over_another(last: bool) -> None:
    """``run`` of layers returns output and gradient; the last layer delays attention's."""
    plain, ours = (
        model("moe", **MOE, delay_wgrad_compute=True).decoder_layers[0] for _ in range(2)
    )
    assert isinstance(ours, TransformerLayer)
    inputs = [torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    leaf = inputs[0].clone().requires_grad_()
    expected = [plain(leaf), plain(inputs[1])]
    grad = torch.ones_like(expected[0])
    expected[0].backward(grad)
    back, ahead = (TransformerLayerSchedulePlan(ours, None, object(), None, None) for _ in "ba")
    outputs = [
        TransformerLayerSchedulePlan.run(back, None, inputs[0].clone().requires_grad_())[0],
        *TransformerLayerSchedulePlan.run(ahead, back, inputs[1], grad, last),
    ]
    assert same(outputs[0], expected[0].detach())
    assert same(outputs[1], expected[1].detach())
    assert same(outputs[2], leaf.grad)
    weights = [layer.self_attention.qkv.weight for layer in (ours, plain)]
    assert (weights[0].grad is None) == last
    if last:
        back.attn.backward_dw()
    assert same(weights[0].grad, weights[1].grad)
    assert TransformerLayerSchedulePlan.run(None, None) == (None, None)


def test_packed_sequences_attend_within_themselves() -> None:
    """The result is as with a mask for it."""
    of = model("dense")
    number = torch.tensor([0] * 3 + [1] * 5)
    mask = (number[:, None] != number[None]) | torch.ones(8, 8, dtype=torch.bool).triu(1)
    ends = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 8]))
    packed = run(plan_of(of, 0, packed_seq_params=ends), None)
    assert same(packed, run(plan_of(of, 0, attention_mask=mask), None))
    assert not same(packed, run(plan_of(of, 0), None))


class SequenceFirst(MoeTransformerLayer):
    """A model whose hidden states are (sequence, batch, hidden), as Megatron's."""

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = super().attend(hidden.transpose(0, 1), mask)
        return out.transpose(0, 1)


def test_hidden_states_have_the_layout_of_the_models_layers() -> None:
    """A chunk of layers of Megatron's layout gets and returns only this layout."""
    chunks = [GPTModel(config("moe"), pre_process=False, post_process=False) for _ in "op"]
    for layer in chunks[0].decoder_layers:
        layer.__class__ = SequenceFirst
    theirs = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plan = chunks[0].build_schedule_plan(None, decoder_input=theirs)
    found = run(plan, None)
    found.backward(torch.ones_like(found))
    run(None, plan, torch.ones_like(found))
    expected = chunks[1](theirs.transpose(0, 1))
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(found, expected.transpose(0, 1))
    for one, other in zip(*(chunk.parameters() for chunk in chunks), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def _scaled(hidden_states: Tensor, model: Any, context: float, **told: Any) -> Tensor:
    assert {"labels", "loss_mask", "further", "packed_seq_params"} <= told.keys()
    out: Tensor = model.output(hidden_states, told["labels"], told["loss_mask"]) * context
    return out


PADDING = torch.arange(8).expand(2, -1) >= 6


@pytest.mark.parametrize(
    ("given", "to_model", "scale"),
    [
        # Experts add nothing to tokens that are none.
        ({"padding_mask": PADDING}, {"padding_mask": PADDING}, 1.0),
        # It gets the hidden states, the context and what else a loss may need.
        ({"output_processor": _scaled, "output_processor_context": 3.0}, {}, 3.0),
    ],
    ids=["padding mask", "output processor"],
)
def test_a_plan_takes_what_the_models_forward_does(
    given: dict[str, Any], to_model: dict[str, Any], scale: float
) -> None:
    """It gives the same numbers; a loss outside the schedule gives ``b_grad``."""
    ours, plain = (model("moe", "dense", **MOE) for _ in "op")
    plan = plan_of(ours, 0, **given)
    output = run(plan, None)
    output.square().mean().backward()
    run(None, plan, output.grad)
    batch = microbatch(0)
    expected = plain(batch.pop("input_ids"), **batch, **to_model) * scale
    expected.square().mean().backward()
    assert same(output, expected.detach())
    assert differing(ours, plain) == []
    assert not same(output, run(plan_of(ours, 0), None))


def test_layers_are_taken_out_from_the_last_one() -> None:
    """A plan is of the abstract class; each layer has its config, and frees its state."""
    plan = plan_of(model("dense", "moe"), 0)
    assert isinstance(plan, AbstractSchedulePlan)
    kinds = [plan.pop_layer().kind for _ in range(plan.num_layers())]
    assert [kind.moe for kind in kinds] == [True, False]
    with pytest.raises(IndexError, match="the plan has 0"):
        plan.pop_layer()
    layer = plan_of(model("dense"), 0).get_layer(0)
    assert layer.config.num_layers == 1
    layer.release_state()
    assert layer.chunk_state is None


class Recomputed(TransformerLayer):
    """A layer whose attention is recomputed in the backward."""

    reentrant = False

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run attention on (batch, sequence, hidden)."""
        attend = super().attend
        out: Tensor = checkpoint(lambda x: attend(x, mask), hidden, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_weight_gradients_of_what_is_recomputed_come_later(reentrant: bool) -> None:
    """Delayed or not, with a checkpoint or without, the bits are equal."""
    grads = []
    for kind in (TransformerLayer, Recomputed):
        for delayed in (False, True):
            of = GPTModel(replace(model("dense").config, delay_wgrad_compute=delayed))
            for layer in of.layers.values():
                layer.__class__ = kind  # of dense layers
                layer.reentrant = reentrant
            ids = torch.arange(8)[None].expand(2, -1)
            for _ in range(2):
                plan = of.build_schedule_plan(ids, labels=ids)
                out = run(plan, None)
                run(None, plan, torch.ones_like(out))
            grads.append([parameter.grad for parameter in of.parameters()])
    for other in grads[1:]:
        assert all(map(same, grads[0], other))


def test_without_gradients_a_forward_holds_nothing() -> None:
    """The output is the same, and nothing is kept for a backward."""
    of = model("moe", mtp_num_layers=1)
    with torch.no_grad():
        output = run(plan_of(of, 0), None)
    assert same(output, run(plan_of(of, 0), None))
    assert not output.requires_grad
    ids = microbatch(0)["input_ids"]
    assert same(run(of.build_schedule_plan(ids), None), of(ids))


# ----------------------------------------------------------------------------------- bad input


def _plan(**more: Any) -> TransformerModelChunkSchedulePlan:
    """Return the plan of one layer."""
    return plan_of(model("dense"), 0, **more)


def _turns(*calls: str) -> None:
    """Run one plan in these directions, or release it."""
    plan = _plan()
    for call in calls:
        if call == "release":
            plan.release_state()
        elif call == "forward":
            run(plan, None)
        else:
            run(None, plan, None if call == "without grad" else GRAD)


def _layer_plan(layer: Any, state: Any = None) -> None:
    TransformerLayerSchedulePlan(layer, None, state, None, None)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: _turns("forward", "without grad"), ValueError, "b_grad is not: give the gradient"),
    (lambda: _turns("forward", "backward", "backward"), RuntimeError, "was run backward already"),
    (lambda: _turns("forward", "release", "backward"), RuntimeError, "or released"),
    (lambda: _turns("forward", "forward"), RuntimeError, "was run forward already: build a plan"),
    (lambda: _turns("backward"), RuntimeError, "run backward, and it was not run forward yet"),
    (lambda: _plan().get_layer(1), IndexError, "layer 1 was asked for"),
    (lambda: _plan().get_layer(-1), IndexError, "layer -1 was asked for"),
    (
        lambda: TransformerLayerSchedulePlan.run(_plan().layers[0], None),
        ValueError,
        "f_layer is given and f_input is not",
    ),
    (lambda: _layer_plan(nn.Linear(1, 1)), TypeError, "no method attend, feed_forward: give one"),
    (
        lambda: _layer_plan(model("dense", mtp_num_layers=1).predictors[0], SimpleNamespace()),
        TypeError,
        "needs a ModelChunkState",
    ),
    (lambda: _plan(input_ids=None), ValueError, "input_ids is None"),
    (
        lambda: _plan(attention_mask=torch.zeros(8, 8)),
        ValueError,
        "the attention mask is of torch.float32: give a boolean one",
    ),
    (
        lambda: plan_of(GPTModel(config("dense"), pre_process=False), 0),
        ValueError,
        "decoder_input is None: this chunk has no embedding",
    ),
    (
        lambda: _plan(extra_block_kwargs={"rotary": 1}),
        ValueError,
        "extra_block_kwargs has rotary, which layers do not take",
    ),
    (
        lambda: _plan(packed_seq_params=SimpleNamespace(cu_seqlens_q=[1, 8])),
        ValueError,
        "cu_seqlens_q is .1, 8.: give where sequences end",
    ),
    (
        lambda: training_pipeline(model("dense", mtp_num_layers=1)).run(
            [{"input_ids": microbatch(0)["input_ids"]}]
        ),
        ValueError,
        "give labels with each microbatch",
    ),
]
"""A call, its error, and the message."""


def test_wrong_input_is_refused_in_words() -> None:
    """The error says what is wrong, the rule, and what to do."""
    for wrong, kind, told in WRONG:
        with pytest.raises(kind, match=told):
            wrong()


def _other_layers() -> list[str]:
    """Return the errors, and the differences if each rank has a group of its own."""
    types = ("moe", "dense") if dist.get_rank() else ("moe", "moe")
    # What one rank has run before tells it nothing about the others.
    run(plan_of(model(*types), 0), None)
    of = model(*types, group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="run different layers, or in different orders"):
        run(plan_of(of, 0), None)
    with pytest.raises(RuntimeError, match=r"task .f1.mo.*rank 1"):
        training_pipeline(of)
    groups = [dist.new_group([rank]) for rank in range(2)]
    ours, plain = (model(*types, group=groups[dist.get_rank()]) for _ in range(2))
    with training_pipeline(ours) as pipeline:
        pipeline.run([microbatch(0)])
    run_plain(plain, [0])
    return differing(ours, plain)


def test_ranks_of_one_group_that_run_other_layers_are_refused(two_ranks: Ranks) -> None:
    """The error comes before the first exchange, which would hang; other groups are free."""
    assert two_ranks.run(_other_layers) == [[], []]

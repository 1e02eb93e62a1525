"""Training on microbatches: each forward overlaps the backward of the previous microbatch.

period      0    1    2    3      an iteration is a microbatch; a run of the pipeline is the
forward     0    1    2           accumulation of one optimizer step
backward         0    1    2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

import torch
from torch import Tensor

from swpipe.core.plan import PipelinePlan
from swpipe.core.task import DeclaredIO, PipelineTask, TaskFn
from swpipe.device import Device
from swpipe.pipeline import PipelineOptions, SWPipeline
from swpipe.plans.transformer import LayerKind, LayerStep, chunk_order, layer_overlap_plan
from swpipe.tasks.transformer.chunk_schedule import TransformerModelChunkSchedulePlan
from swpipe.tasks.transformer.layer_runs import Side, check_same_plan_in_group, step_function
from swpipe.tasks.transformer.layer_schedule import Layer, kind_of
from swpipe.tasks.transformer.model_interface import ChunkModel
from swpipe.tasks.transformer.schedule_node import as_leaf, device_of

Loss: TypeAlias = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""Maps a chunk's output and the microbatch to a scalar, which is differentiated."""

_OF_MTP = (("attn", ""), ("mtp_post_process", ""))
"""The steps of a layer for multi-token prediction that embed tokens or compute logits."""


def mean_of_output(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean of the losses of all tokens."""
    return output.mean()


def layer_kinds(model: ChunkModel) -> tuple[LayerKind, ...]:
    """Return the kinds of a chunk's layers in order, those for multi-token prediction last."""
    layers: list[Layer] = [*model.decoder_layers, *model.predictors]
    return tuple(map(kind_of, layers))


def training_plan(model: ChunkModel) -> PipelinePlan:
    """Return the plan that overlaps a model's layers: see ``layer_overlap_plan``."""
    return layer_overlap_plan(layer_kinds(model), shared=_shares(model))


def training_tasks(model: ChunkModel, loss: Loss = mean_of_output) -> list[PipelineTask]:
    """Return the tasks of ``training_plan``, in serial order.

    A microbatch is a mapping of the arguments of ``TransformerModelChunkSchedulePlan``, with labels
    if the model has layers for multi-token prediction. The tasks set ``ctx.loss``, a scalar, and
    add to the gradients of parameters. Parameters and gradients must not be changed elsewhere
    before all microbatches of an optimizer step are done.

    Args:
        model: A model, or a chunk of one.
        loss: Maps the output to the scalar that is differentiated.
    """
    kinds = layer_kinds(model)
    shared = _shares(model)
    around: dict[str, TaskFn] = {
        "f.begin": lambda ctx: _begin(ctx, model, kinds),
        "f.end": lambda ctx: _end(ctx, loss),
        "b.begin": lambda ctx: ctx.b.chunk.begin("backward"),
        "b.end": _release,
    }
    # No hooks: they serve schedules that send values between chunks.
    steps = {step.name: step for step in chunk_order(kinds, kinds, hooks=False)}
    tasks = []
    for name in training_plan(model).schedule:
        # Every step reads parameters. ``others`` says that undeclared tasks do not write them.
        states = [DeclaredIO(state="parameters", mode="r", others="r")]
        if steps[name].side == "b":
            # A step adds to gradients of its own parameters; shared ones are declared below.
            states.append(DeclaredIO(state=f"gradients of {name}", others=""))
            if shared and _uses_shared(steps[name], kinds):
                states.append(DeclaredIO(state="shared gradients", others=""))
        tasks.append(PipelineTask(name, around.get(name) or step_function(steps[name]), io=states))
    return tasks


def training_pipeline(
    model: ChunkModel,
    loss: Loss = mean_of_output,
    *,
    plan: PipelinePlan | None = None,
    device: Device | torch.device | str | None = None,
    **options: Unpack[PipelineOptions],
) -> SWPipeline[Any]:
    """Return a pipeline that trains a chunk on microbatches; run it once per optimizer step.

    Plans are compared within the model's expert group. Ranks of other groups may train other
    chunks.

    Args:
        model: See ``training_tasks``.
        loss: See ``training_tasks``.
        plan: Another plan of the same tasks, such as the result of ``swpipe.planning.auto_plan``;
            None for ``training_plan``.
        device: The device; None for the model's.
        options: Options of ``SWPipeline``.

    Raises:
        RuntimeError: Ranks of the expert group have different plans.
        PlanError: The plan cannot run.
    """
    plan = training_plan(model) if plan is None else plan
    check_same_plan_in_group(plan, model.expert_group)
    # The pipeline would compare all ranks, and those of other groups may have other plans.
    options.setdefault("check_ranks", False)
    device = device_of(model) if device is None else device
    return SWPipeline(plan, training_tasks(model, loss), device=device, **options)


def _shares(model: ChunkModel) -> bool:
    """Return whether several steps use one parameter."""
    return model.share_embeddings_and_output_weights or bool(model.predictors)


def _uses_shared(step: LayerStep, kinds: Sequence[LayerKind]) -> bool:
    """Return whether a step uses the embedding or the output layer."""
    if step.layer is None:
        return step.node.endswith("_process")
    return kinds[step.layer].mtp and (step.node, step.part) in _OF_MTP


def _begin(ctx: Any, model: ChunkModel, kinds: tuple[LayerKind, ...]) -> None:
    # The plan's tasks are fixed when the pipeline is made, so each microbatch must match them.
    plan = TransformerModelChunkSchedulePlan(model, **ctx.batch)
    if plan.kinds != kinds:
        raise ValueError(
            f"the microbatch makes a plan of {plan.num_layers()} layers, and the pipeline trains "
            f"{len(kinds)}: give labels with each microbatch, and no extra_block_kwargs"
        )
    plan.begin("forward")
    ctx.f = Side(plan.layers, None, plan)
    ctx.b = ctx.f
    ctx.f_value = None
    ctx.same_order = None  # ranks compared their plans when the pipeline was made


def _end(ctx: Any, loss: Loss) -> None:
    # A leaf, so that the loss has a graph of its own and backward starts with its gradient.
    output = as_leaf(ctx.f_value)
    with torch.enable_grad():
        scalar = loss(output, ctx.batch)
    (ctx.b_value,) = torch.autograd.grad(scalar, output)
    ctx.loss = scalar.detach()
    del ctx.f, ctx.f_value


def _release(ctx: Any) -> None:
    ctx.b.chunk.release_state()
    del ctx.b, ctx.b_value

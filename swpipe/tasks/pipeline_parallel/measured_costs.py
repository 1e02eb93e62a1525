"""Measurement of the time and memory of each stage's passes, before the training."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe.device import resolve
from swpipe.distributed import gather
from swpipe.inference.operators import tensors_of
from swpipe.plans.pipeline_parallel import (
    Action,
    PipelineCosts,
    PipelineSchedule,
    check_schedule,
)
from swpipe.plans.pipeline_parallel.pipeline_costs import OF_STAGES
from swpipe.tasks.pipeline_parallel.paired_passes import has_plans, plan_of
from swpipe.tasks.pipeline_parallel.pipeline_runtime import LossFn, PipelineRuntime
from swpipe.tasks.pipeline_parallel.pipeline_stage import as_tuple
from swpipe.tasks.pipeline_parallel.run_rules import kept_buffers
from swpipe.tasks.pipeline_parallel.split_backward import input_pass, whole_pass
from swpipe.values import Storages, nbytes

LEAST_MS = 1e-3
"""The smallest cost of a pass, in ms: stage 0 does nothing in I, and a cost must be positive."""

Example: TypeAlias = Callable[[int], Tensor | tuple[Tensor, ...]]
Look = TypeVar("Look")


def measure_costs(
    chunks: Mapping[int, nn.Module],
    n_stages: int,
    example: Example,
    loss_fn: LossFn,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    rounds: int = 5,
) -> PipelineCosts:
    """Measure each stage's passes over one microbatch, and the time of a hop between two ranks.

    This is a collective; all ranks get the same costs. Parameters, gradients and buffers keep their
    values.

    Args:
        chunks: The module of each stage of this rank, by stage, from 0.
        n_stages: The number of stages on all ranks together.
        example: Returns a stage's input for one microbatch, on the chunk's device: a tensor, or a
            tuple of tensors.
        loss_fn: See ``PipelineRuntime``.
        target: The target of one microbatch.
        group: The ranks; None for the default group.
        rounds: The number of measurements of each pass, after one warm-up run; the result is their
            median.

    Returns:
        The costs per stage, in ms and bytes. F and I include the runtime's time outside a pass, for
        example to send its result. Bytes count activations: the results of operators, and the
        inputs of all stages except the first. If all chunks have ``build_schedule_plan``,
        ``pair`` is the time of a stage's F overlapped with the B of another stage of the rank. As
        in torch's runtime, I of stage 0 costs (next to) nothing, and its W costs its whole backward
        pass.
    """
    own: dict[int, dict[str, float]] = {}
    parameters = [parameter for chunk in chunks.values() for parameter in chunk.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    have_plans = all(map(has_plans, chunks.values()))
    with kept_buffers(chunks.values()):
        for stage, chunk in chunks.items():
            given = as_tuple(example(stage))
            is_first = stage == 0
            of_loss = (lambda out: loss_fn(out, target)) if stage == n_stages - 1 else None
            other = next((number for number in chunks if number != stage), stage)
            timed = []
            for _ in range(rounds + 1):
                # Without old gradients, as in the first microbatch of a step.
                chunk.zero_grad(set_to_none=True)
                looks = _passes(chunk, given, is_first, of_loss, partial(_now_ms, given[0].device))
                times = [end - begin for begin, end in pairwise(looks)]
                # OF_STAGES names F, I, W and the pair, in this order; without plans the zip ends
                # before the pair.
                times += [_pair_ms(chunks, stage, other, example)] if have_plans else []
                timed.append(dict(zip(OF_STAGES, times, strict=False)))
            # The first round is slower: it loads kernels and fills the allocator's cache.
            own[stage] = {
                name: max(LEAST_MS, statistics.median(times[name] for times in timed[1:]))
                for name in timed[0]
            }
            own[stage] |= _memory(chunk, given, is_first, of_loss)
        # Stage 1's input is what stage 0 sends; a pipeline of one stage sends nothing.
        largest = max(as_tuple(example(min(1, n_stages - 1))), key=lambda tensor: tensor.nbytes)
        hop_ms = measure_hop(largest, group=group)
        by_rank = gather(own, group)
        held = {stage: values for stages in by_rank for stage, values in stages.items()}
        known = set.intersection(*map(set, held.values()))  # ranks without plans measure no pairs
        of_stages = {name: [held[stage][name] for stage in range(n_stages)] for name in known}
        costs = PipelineCosts(hop=hop_ms, **of_stages)  # type: ignore[arg-type]
        schedule = _one_by_one([sorted(stages) for stages in by_rank])
        step_ms = _step_ms(schedule, chunks, example, loss_fn, target, group, rounds)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # No pass of this step overlaps another one: the rest is the runtime's own time.
    alone = check_schedule(schedule, replace(costs, max_mem=math.inf)).makespan
    rest = max(0.0, step_ms - alone) / (2 * n_stages)
    return replace(
        costs,
        forward=[time + rest for time in of_stages["forward"]],
        backward=[time + rest for time in of_stages["backward"]],
    )


def _one_by_one(stages: Sequence[Sequence[int]]) -> PipelineSchedule:
    """Return the schedule of one microbatch for the stages of each rank, in order."""
    rows = (
        (*(Action(s, "F", 0) for s in own), *(Action(s, "B", 0) for s in reversed(own)))
        for own in stages
    )
    return PipelineSchedule(tuple(rows), 1)


def _step_ms(
    schedule: PipelineSchedule,
    chunks: Mapping[int, nn.Module],
    example: Example,
    loss_fn: LossFn,
    target: Tensor,
    group: dist.ProcessGroup | None,
    rounds: int,
) -> float:
    """Return the median time of a step on the runtime, in ms; the same on all ranks."""
    device = as_tuple(example(next(iter(chunks))))[0].device
    runtime = PipelineRuntime(schedule, chunks, loss_fn, device=device, group=group)
    inputs = as_tuple(example(0)) if 0 in chunks else ()
    times = []
    for _ in range(rounds + 1):
        dist.barrier(group)
        begin = _now_ms(device)
        runtime.train(*inputs, target=target)
        dist.barrier(group)
        times.append(_now_ms(device) - begin)
    return gather(statistics.median(times[1:]), group)[0]


def measure_hop(
    tensor: Tensor, *, group: dist.ProcessGroup | None = None, rounds: int = 20
) -> float:
    """Return the median time of one send of a tensor between ranks 0 and 1, in ms.

    This is a collective; all ranks get the same result. A group of one rank sends nothing, and gets
    ``LEAST_MS``.

    Args:
        tensor: A tensor of the size to send, on the device to send from.
        group: The ranks; None for the default group.
        rounds: The number of round trips; a send takes half of one.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    times = []
    if rank < 2 <= size:
        buffer = tensor.detach().clone()
        for _ in range(rounds):
            begin = time.perf_counter()
            for sender in (0, 1):
                if rank == sender:
                    dist.send(buffer, group=group, group_dst=1 - rank)
                else:
                    dist.recv(buffer, group=group, group_src=1 - rank)
            times.append((time.perf_counter() - begin) * 1e3 / 2)
    own = max(LEAST_MS, statistics.median(times)) if times else LEAST_MS
    return gather(own, group)[0]


def _now_ms(device: torch.device) -> float:
    resolve(device).synchronize()
    return time.perf_counter() * 1e3


def _passes(
    chunk: nn.Module,
    given: Sequence[Tensor],
    is_first: bool,
    loss_fn: Callable[[Any], Tensor] | None,
    look: Callable[[], Look],
) -> list[Look]:
    """Run F, I and W of a chunk, and return the results of ``look`` before, between and after."""
    # Detached, so that each round builds a graph of its own.
    given = [tensor.detach() for tensor in given]
    for tensor in () if is_first else given:
        tensor.requires_grad_(tensor.is_floating_point())
    looks = [look()]
    output = chunk(*given)
    outputs = as_tuple(output if loss_fn is None else loss_fn(output))
    looks.append(look())
    grads = [torch.ones_like(out) if out.requires_grad else None for out in outputs]
    left = None
    if not is_first:
        left = input_pass(outputs, grads, given)[1]
        # A stage has handed on its outputs by now: they do not count as memory of W.
        del output, outputs
    looks.append(look())
    if is_first:
        whole_pass(outputs, grads, given)
    elif left is not None:
        left.run()
    return [*looks, look()]


def _memory(
    chunk: nn.Module,
    given: Sequence[Tensor],
    is_first: bool,
    loss_fn: Callable[[Any], Tensor] | None,
) -> dict[str, float]:
    """Return the memory that each pass of a chunk adds, in bytes.

    Call after a first backward pass: the memory of the parameters' gradients does not count.
    """
    watch = Bytes(() if is_first else given)
    with watch:
        _, (f, of_f), (i, of_i), (_, of_w) = _passes(chunk, given, is_first, loss_fn, watch.look)
    # The working memory: while a pass runs, it may need more than before it (W), after it (F), or
    # at either end (I). The schedule accounts for the memory at the ends: F adds at least 1 byte,
    # and W frees all that F and I have added.
    work = max(0, of_f - f, of_i - max(f, i), of_w - i)
    return {"f_mem": max(1, f), "b_mem": i - max(1, f), "w_mem": -i, "work_mem": work}


class Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes of given tensors and of operators' results.

    A storage counts as long as it is alive.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = Storages()
        self._sizes = dict[int, int]()
        self._most = 0
        self._add(tensors, ())

    def look(self) -> tuple[int, int]:
        """Return the present number of bytes, and the largest since the previous call."""
        now = self._held()
        most = self._most
        self._most = now
        return now, max(now, most)

    def _held(self) -> int:
        alive = self._storages.alive
        self._sizes = {number: size for number, size in self._sizes.items() if alive(number)}
        return sum(self._sizes.values())

    def _add(self, tensors: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        # An operator that returns a view, or writes in place, makes no new memory.
        known = {number for tensor in given for number in nbytes(tensor)}
        for tensor in tensors:
            for number, is_new in self._storages.add(tensor):
                if is_new and number not in known:
                    self._sizes[number] = nbytes(tensor)[number]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(tensors_of([result]), tensors_of([*args, *(kwargs or {}).values()]))
        self._most = max(self._most, self._held())
        return result


def _pair_ms(chunks: Mapping[int, nn.Module], f: int, b: int, example: Example) -> float:
    """Return the time in ms of stage ``f``'s F, overlapped with the B of stage ``b``."""
    # Only the overlapped call is timed: the B needs a forward pass of its own before.
    back, ahead = (
        plan_of(chunks[stage], (given if stage == 0 else given.requires_grad_(),), stage == 0)
        for stage, given in ((number, as_tuple(example(number))[0].detach()) for number in (b, f))
    )
    grad = torch.ones_like(back.run(back, None))
    begin = _now_ms(grad.device)
    ahead.run(ahead, back, grad)
    return _now_ms(grad.device) - begin

"""What the passes of a model's chunks cost on this machine, measured before the training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe._distributed.rank_checks import gather
from swpipe.device import resolve
from swpipe.plans.pipeline_parallel import PipelineCosts
from swpipe.tasks.pipeline_parallel.paired_passes import has_plans, plan_of
from swpipe.tasks.pipeline_parallel.pipeline_runtime import LossFn
from swpipe.tasks.pipeline_parallel.run_rules import kept_buffers
from swpipe.tasks.pipeline_parallel.split_backward import input_pass

LEAST_MS = 1e-3
"""What a pass costs at least: stage 0 does nothing in I."""


def measure_costs(
    chunks: Mapping[int, nn.Module],
    n_stages: int,
    example: Callable[[int], Tensor],
    loss_fn: LossFn,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    rounds: int = 5,
) -> PipelineCosts:
    """Time each stage's passes over one microbatch, and how long a result is under way.

    A collective; all ranks get the same costs. Parameters, gradients and buffers stay as they are.

    Args:
        chunks: Stage to module, of this rank's stages; each takes one tensor and gives one.
        n_stages: On all ranks together.
        example: Stage to an input of one microbatch, on the chunk's device.
        loss_fn: As of ``PipelineRuntime``.
        target: Of one microbatch.
        group: The ranks; None for the default group.
        rounds: How often each pass is timed, after a first time that does not count; the median
            is taken.

    Returns:
        Costs per stage in ms; of memory, the defaults. Where all chunks have
        ``build_schedule_plan``, ``pair`` is the time of their F over the B of another stage of the
        rank. As torch's runtime has it, I of stage 0 costs (next to) nothing, and its W what its
        whole backward pass costs.
    """
    own: dict[int, list[float]] = {}
    parameters = [parameter for chunk in chunks.values() for parameter in chunk.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    have_plans = all(map(has_plans, chunks.values()))
    with kept_buffers(chunks.values()):
        for stage, chunk in chunks.items():
            of_loss = (lambda out: loss_fn(out, target)) if stage == n_stages - 1 else None
            other = next((one for one in chunks if one != stage), stage)
            timed = []
            for _ in range(rounds + 1):
                times = _times_ms(chunk, example(stage), is_first=stage == 0, loss_fn=of_loss)
                pair = [_pair_ms(chunks, stage, other, example)] if have_plans else []
                timed.append([*times, *pair])
            own[stage] = [
                max(LEAST_MS, statistics.median(times)) for times in zip(*timed[1:], strict=True)
            ]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    hop_ms = measure_hop(example(min(1, n_stages - 1)), group=group)
    costs = {stage: times for held in gather(own, group) for stage, times in held.items()}
    forward, backward, weight = zip(*(costs[stage][:3] for stage in range(n_stages)), strict=True)
    pair = [time for stage in range(n_stages) for time in costs[stage][3:]]
    paired = pair if len(pair) == n_stages else None  # some ranks may have no plans
    return PipelineCosts(forward, backward, weight, hop=hop_ms, pair=paired)


def measure_hop(
    tensor: Tensor, *, group: dist.ProcessGroup | None = None, rounds: int = 20
) -> float:
    """Half of the time, in ms, in which ranks 0 and 1 send a tensor to and fro: the median.

    A collective; all ranks get the same. With one rank nothing is sent.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
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


def _times_ms(
    chunk: nn.Module, given: Tensor, *, is_first: bool, loss_fn: Callable[[Tensor], Tensor] | None
) -> tuple[float, float, float]:
    """F, I and W of a chunk, once each."""
    synchronize = resolve(given.device).synchronize
    chunk.zero_grad(set_to_none=True)
    given = given.detach().requires_grad_(not is_first)

    def now() -> float:
        synchronize()
        return time.perf_counter() * 1e3

    begin = now()
    output = chunk(given)
    output = output if loss_fn is None else loss_fn(output)
    forward = now()
    grads = [torch.ones_like(output)]
    if is_first:
        backward = now()
        torch.autograd.backward([output], grads)
    else:
        _, left = input_pass([output], grads, [given])
        backward = now()
        if left is not None:
            left.run()
    weight = now()
    return forward - begin, backward - forward, weight - backward


def _pair_ms(
    chunks: Mapping[int, nn.Module], f: int, b: int, example: Callable[[int], Tensor]
) -> float:
    """The F of a stage over the B of another one."""
    back, ahead = (
        plan_of(chunks[stage], (given if stage == 0 else given.requires_grad_(),), stage == 0)
        for stage, given in ((one, example(one).detach()) for one in (b, f))
    )
    grad = torch.ones_like(back.run(back, None))
    synchronize = resolve(grad.device).synchronize
    synchronize()
    begin = time.perf_counter()
    ahead.run(ahead, back, grad)
    synchronize()
    return (time.perf_counter() - begin) * 1e3

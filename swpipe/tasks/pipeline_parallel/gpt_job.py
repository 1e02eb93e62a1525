"""A small GPT in training: in one process, or its layers on the ranks of a process group.

The data are generated: a token follows from the one before it by a fixed permutation, and now and
then by chance, so that the loss falls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe._distributed.rank_checks import gather
from swpipe.core.task import PipelineTask
from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    plan_v_schedule,
    torch_schedule,
)
from swpipe.plans.pipeline_parallel.torch_orders import TorchOrder
from swpipe.tasks.pipeline_parallel.measured_costs import measure_costs
from swpipe.tasks.pipeline_parallel.pipeline_runtime import PipelineRuntime, SerialRuntime
from swpipe.tasks.pipeline_parallel.train_tasks import PipelineTrainTasks, Runtime
from swpipe.tasks.transformer import GPTModel, TransformerConfig, mean_loss
from swpipe.tasks.workload import Job

T = TypeVar("T")

EPOCH = 100
"""Steps where none are named: the data have no end."""

OURS = "ours"
"""A V, planned for measured costs."""

EFFORT = 0.4
"""With which it is searched for."""

_BY_CHANCE = 0.1
_LEARNING_RATE = 1e-3
_TOKENS = 101  # different ones; a prime, so that the generated text has long cycles


@dataclass(frozen=True, slots=True)
class GPTJobConfig:
    """What is trained on what.

    Attributes:
        model: The whole model's sizes.
        sequences: Per step, on all ranks together; a multiple of ``n_micro``.
        n_micro: The number of microbatches.
        schedule: As of ``choose_schedule``; not used in one process.
        device: Where it works, in torch's words.
    """

    model: TransformerConfig
    sequences: int
    n_micro: int
    schedule: str
    device: str

    def __post_init__(self) -> None:
        if self.sequences % self.n_micro:
            raise ValueError(
                f"{self.sequences} sequences per step, which {self.n_micro} microbatches do not "
                f"divide: give a multiple of {self.n_micro}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GPTJobConfig:
        """From the workload's options at the command line."""
        model = TransformerConfig(
            num_layers=options["layers"],
            hidden_size=options["hidden_size"],
            num_attention_heads=options["heads"],
            vocab_size=_TOKENS,
            max_sequence_length=options["sequence_length"],
            seed=options["seed"],
        )
        return cls(
            model,
            sequences=options["global_batch_size"],
            n_micro=options["microbatches"],
            schedule=options["schedule"],
            device=options["device"] or "cpu",
        )


class GPTJob(Job):
    """A GPT in training in one process, microbatch after microbatch.

    Attributes:
        config: As given.
        runtime: Runs a step.
        optimizer: Of the parameters that are here.
    """

    epoch_steps = EPOCH

    def __init__(self, config: GPTJobConfig) -> None:
        self.config = config
        self.runtime: Runtime = self._make()
        self.modules = self.runtime.modules
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE)

    def _make(self) -> Runtime:
        model = GPTModel(self.config.model, device=self.config.device)
        return SerialRuntime([model], self.config.n_micro, mean_loss)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """Three, in serial order."""
        return PipelineTrainTasks(self.runtime, self.optimizer, self.load).tasks()

    def load(self, number: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The tokens of a step, and the tokens after them; the same on all ranks."""
        model = self.config.model
        draw = torch.Generator().manual_seed(model.seed * (2**31 - 1) + number)
        shape = (self.config.sequences, model.max_sequence_length)
        columns = [torch.randint(model.vocab_size, (shape[0], 1), generator=draw)]
        by_chance = torch.rand(shape, generator=draw) < _BY_CHANCE
        drawn = torch.randint(model.vocab_size, shape, generator=draw)
        for place in range(shape[1]):
            follows = (columns[-1][:, 0] * 5 + 3) % model.vocab_size
            columns.append(torch.where(by_chance[:, place], drawn[:, place], follows)[:, None])
        text = torch.cat(columns, 1).to(self.config.device)
        return (text[:, :-1],), text[:, 1:]

    def batches(self, steps: int | None = None, /) -> Iterator[int]:
        """Numbers of steps, from 0."""
        return islice(iter(range(EPOCH if steps is None else steps)), steps)

    def retired(self, ctx: Any) -> Tensor | None:
        """The mean loss of the microbatches; None on ranks without the last stage."""
        return None if ctx.losses is None else ctx.losses.mean()

    def results(self) -> dict[str, str]:
        """A digest of the whole model's parameters: equal ones have equal digests."""
        own = {
            name: hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()
            for module in self.modules
            for name, parameter in module.named_parameters()
        }
        names = {name: digest for held in self.over_ranks(own) for name, digest in held.items()}
        digest = hashlib.sha256(repr(sorted(names.items())).encode()).hexdigest()
        return {"parameters": digest[:16]}


class PipelineGPTJob(GPTJob):
    """The same model, its layers on the ranks of the default process group.

    Making one is a collective, and so are its steps, ``over_ranks`` and ``results``.

    Attributes:
        schedule: What the steps run.

    Raises:
        ScheduleError: There is no such schedule for these ranks, or the model has too few layers
            for its stages; raised on all ranks.
    """

    schedule: PipelineSchedule

    def _make(self) -> Runtime:
        config = self.config
        self.schedule = choose_schedule(config.schedule, config.n_micro, self._measure)
        stages = [s for s, place in enumerate(self.schedule.placement) if place == dist.get_rank()]
        chunks = {stage: self._chunk(stage, self.schedule.n_stages) for stage in stages}
        return PipelineRuntime(self.schedule, chunks, mean_loss, device=config.device)

    def _measure(self) -> PipelineCosts:
        """Of a V's stages."""
        size, rank = dist.get_world_size(), dist.get_rank()
        chunks = {stage: self._chunk(stage, 2 * size) for stage in (rank, 2 * size - 1 - rank)}
        (tokens,), labels = self.load(0)
        rows = len(tokens) // self.config.n_micro
        tokens, labels = tokens[:rows], labels[:rows]
        hidden = torch.zeros(*tokens.shape, self.config.model.hidden_size, device=tokens.device)
        return measure_costs(
            chunks, 2 * size, lambda stage: hidden if stage else tokens, mean_loss, labels
        )

    def _chunk(self, stage: int, n_stages: int) -> GPTModel:
        model = self.config.model
        return GPTModel(
            model,
            layers_of(stage, n_stages, model.num_layers),
            pre_process=stage == 0,
            post_process=stage == n_stages - 1,
            device=self.config.device,
        )

    def over_ranks(self, value: T, /) -> list[T]:
        return gather(value)


def layers_of(stage: int, n_stages: int, num_layers: int) -> range:
    """The layers of a stage, as evenly as possible; the first stages have one more.

    Raises:
        ScheduleError: There are fewer layers than stages.
    """
    if num_layers < n_stages:
        raise ScheduleError(
            f"the model has {num_layers} layers, and the schedule {n_stages} stages: give at least "
            f"{n_stages} layers"
        )
    each, more = divmod(num_layers, n_stages)
    begin = stage * each + min(stage, more)
    return range(begin, begin + each + (stage < more))


def choose_schedule(
    name: str, n_micro: int, measure: Callable[[], PipelineCosts]
) -> PipelineSchedule:
    """Make, or read, a schedule for the ranks of the default process group. A collective.

    Rank 0 makes it for all: a file may be there only.

    Args:
        name: ``ours``, an order of torch's, or a CSV file.
        n_micro: The number of microbatches.
        measure: Gives the costs of a V's stages, on all ranks; called for ``ours``.

    Raises:
        ScheduleError: There is no such schedule for these ranks and microbatches; raised on all
            of them.
    """
    orders: tuple[Any, ...] = get_args(TorchOrder)
    n_ranks = dist.get_world_size()
    costs = measure() if name == OURS else None
    made: Any = None
    problem = ""
    if dist.get_rank() == 0:
        try:
            if costs is not None:
                planned = plan_v_schedule(
                    n_ranks, n_micro, costs, objective="bubble", effort=EFFORT
                )
                made = planned.schedule
            elif name in orders:
                made = torch_schedule(orders[orders.index(name)], n_ranks, n_micro)
            else:
                made = PipelineSchedule.from_csv(Path(name), n_ranks=n_ranks, n_micro=n_micro)
        except OSError as error:
            names = ", ".join((OURS, *orders))
            problem = f"{error.strerror or error}; name a CSV file, or one of {names}"
        except ValueError as error:  # a ScheduleError, or bytes that are no text
            problem = str(error)
    told = [(made, problem)]
    dist.broadcast_object_list(told)
    ((schedule, problem),) = told
    if problem:
        raise ScheduleError(problem)
    found: PipelineSchedule = schedule
    return found

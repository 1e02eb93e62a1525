"""States of torch and other libraries, and those of loaders, that nobody declares.

They are entered in ``STATES`` beside those of Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SubsetRandomSampler

from tests.loops.undeclared_states import Job, State, state


@state("pandas .at", when="fourth")
def pandas_at(job: Job) -> State:
    import pandas as pd

    frame = pd.DataFrame({"level": [1.0]})

    def write(number: int) -> None:
        frame.at[0, "level"] += 1.0

    return State(lambda: float(frame.at[0, "level"]), write)


@state("rows of a DataFrame", reader="loader", when="fourth")
def data_frame(job: Job) -> State:
    import pandas as pd

    frame = pd.DataFrame({"level": [1.0]})

    def write(number: int) -> None:
        frame.loc[len(frame)] = [number + 2.0]

    return State(lambda: float(frame["level"].sum()), write)


@state("numpy's generator", writer="body")
def numpy_random(job: Job) -> State:
    return State(lambda: float(np.random.rand()), lambda number: np.random.rand())


@state("numpy array of a tensor")
def numpy_shared(job: Job) -> State:
    tensor = torch.ones(1)
    array = tensor.numpy()
    return State(lambda: float(tensor), lambda number: array.__setitem__(0, number + 2.0))


@state("buffer of a module through numpy", when="once")
def buffer_through_numpy(job: Job) -> State:
    module = nn.BatchNorm1d(1)
    array = module.running_mean.numpy()  # type: ignore[union-attr]

    def write(number: int) -> None:
        array[:] = number + 2.0

    return State(lambda: 1.0 + float(module.running_mean), write)  # type: ignore[arg-type]


@state("torch.backends", when="once")
def backends(job: Job) -> State:
    before = torch.backends.cudnn.benchmark

    def write(number: int) -> None:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark

    def close() -> None:
        torch.backends.cudnn.benchmark = before

    return State(lambda: 1.0 + torch.backends.cudnn.benchmark, write, close=close)


@state("default dtype", when="fourth")
def default_dtype(job: Job) -> State:
    def write(number: int) -> None:
        other = torch.get_default_dtype() == torch.float32
        torch.set_default_dtype(torch.float64 if other else torch.float32)

    return State(
        lambda: float(torch.tensor([0.1]).double()),
        write,
        close=lambda: torch.set_default_dtype(torch.float32),
    )


@state("deterministic algorithms", writer="body", when="fourth")
def deterministic(job: Job) -> State:
    def switch(on: bool) -> None:
        torch.use_deterministic_algorithms(on, warn_only=True)

    return State(
        lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
        lambda number: switch(not torch.are_deterministic_algorithms_enabled()),
        close=partial(switch, False),
    )


@state("gradient mode", writer="body", when="fourth")
def gradient_mode(job: Job) -> State:
    return State(
        lambda: 1.0 + torch.is_grad_enabled(),
        lambda number: torch.set_grad_enabled(not torch.is_grad_enabled()),
        close=lambda: torch.set_grad_enabled(True),
    )


@state("torch's generator", when="fourth")
def torch_random(job: Job) -> State:
    return State(lambda: float(torch.rand(())), lambda number: torch.rand(()))


@state("a given generator", reader="loader", writer="train")
def given_generator(job: Job) -> State:
    draws = torch.Generator().manual_seed(5)
    return State(
        lambda: float(torch.rand((), generator=draws)),
        lambda number: torch.rand((), generator=draws),
    )


@state("SobolEngine")
def sobol(job: Job) -> State:
    engine = SobolEngine(1, scramble=False)
    return State(lambda: float(engine.draw()), lambda number: engine.fast_forward(1))


@state("C++ object")
def store(job: Job) -> State:
    counts = torch.distributed.HashStore()
    counts.add("level", 1)
    return State(lambda: float(counts.get("level")), lambda number: counts.add("level", 1))


@state("TorchScript module", when="fourth")
@state("TorchScript module read by the loader", reader="loader", writer="body")
def scripted(job: Job) -> State:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(nn.BatchNorm1d(1))

    def write(number: int) -> None:
        module.running_mean += 1.0

    return State(lambda: 1.0 + float(module.running_mean), write)


@state("learning rate of the optimizer", when="fourth")
def learning_rate(job: Job) -> State:
    def write(number: int) -> None:
        job.optimizer.param_groups[0]["lr"] *= 0.5

    return State(lambda: 1.0 + job.optimizer.param_groups[0]["lr"], write)


@state("scheduler")
def scheduler(job: Job) -> State:
    rates = StepLR(job.optimizer, 4, 0.5)
    return State(lambda: 1.0 + rates.get_last_lr()[0], lambda number: rates.step())


class Weights(nn.Module):
    """A module that has the loop's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@state("averaged model")
def averaged(job: Job) -> State:
    model = Weights(job.weight)
    mean = AveragedModel(model)
    return State(
        lambda: float(mean.module.weight.detach().sum()),
        lambda number: mean.update_parameters(model),
    )


@state("p.data", reader="loader", when="always")
def parameter_data(job: Job) -> State:
    return State(lambda: float(job.weight.data.sum()), lambda number: job.weight.data.add_(0.1))


@state("gradients", writer="train")
def gradients(job: Job) -> State:
    def read() -> float:
        return 1.0 if job.weight.grad is None else float(job.weight.grad.sum())

    return State(read, lambda number: None)


@state("BatchNorm in training")
def batch_norm(job: Job) -> State:
    module = nn.BatchNorm1d(1)
    data = torch.tensor([[1.0], [3.0]])
    return State(lambda: 1.0 + float(module.running_mean), lambda number: module(data))  # type: ignore[arg-type]


@state("training flag", writer="body", when="fourth")
def training_flag(job: Job) -> State:
    module = nn.Dropout(0.5)
    return State(
        lambda: float(module(torch.ones(4)).sum()) + 1.0,
        lambda number: module.train(not module.training),
        shown=lambda: module.training,
    )


@state("hooks of a module", when="fourth")
def hooks(job: Job) -> State:
    module = nn.Identity()

    def write(number: int) -> None:
        module.register_forward_hook(lambda module, args, output: output + 1)

    return State(lambda: float(module(torch.ones(()))), write)


@state("context of the iteration before", writer="body")
def last_context(job: Job) -> State:
    last = [torch.ones(())]
    return State(lambda: float(last[-1]), lambda number: last.append(job.weight.detach().sum()))


@state("replay buffer", reader="loader")
def replay(job: Job) -> State:
    kept = [1.0]
    return State(lambda: sum(kept[-3:]), lambda number: kept.append(float(job.weight.detach()[0])))


class Rows(Dataset[Tensor]):
    """The batches, read in the process or in a worker."""

    def __init__(self, rows: list[Tensor], level: Any = None) -> None:
        self.rows, self.level = rows, level or [1.0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number] * self.level[0]


def raising(level: list[float], number: int) -> None:
    """Change a level."""
    level[0] += 1.0


@state("dataset without workers", when="fourth", own_loader=True)
def dataset(job: Job) -> State:
    level = [1.0]
    loader = DataLoader(Rows(job.batches, level), batch_size=None)
    return State(lambda: 1.0, partial(raising, level), loader, shown=lambda: level)


@state("collate function", writer="body", when="once", own_loader=True)
def collate(job: Job) -> State:
    level = [1.0]
    loader = DataLoader(
        Rows(job.batches), batch_size=2, collate_fn=lambda rows: torch.stack(rows).sum(0) * level[0]
    )
    return State(lambda: 1.0, partial(raising, level), loader, shown=lambda: level)


class Hard(Sampler[int]):
    """Goes on from where the loop wants it."""

    def __init__(self, count: int) -> None:
        self.count, self.skip = count, [0]

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            yield (number + int(self.skip[0])) % self.count


@state("sampler of the loop's own, with a worker", writer="body", when="fourth", own_loader=True)
def own_sampler(job: Job) -> State:
    sampler = Hard(len(job.batches))
    loader = DataLoader(Rows(job.batches), batch_size=None, sampler=sampler, num_workers=1)
    return State(lambda: 1.0, partial(raising, sampler.skip), loader, shown=lambda: sampler.skip)  # type: ignore[arg-type]


@state("indices of torch's sampler, with a worker", writer="body", own_loader=True)
def indices(job: Job) -> State:
    sampler = SubsetRandomSampler([*range(len(job.batches))])

    def write(number: int) -> None:
        sampler.indices[:] = [(one + 1) % len(job.batches) for one in sampler.indices]  # type: ignore[index]

    loader = DataLoader(Rows(job.batches), batch_size=None, sampler=sampler, num_workers=1)
    return State(lambda: 1.0, write, loader, shown=lambda: list(sampler.indices))


@state("generator of torch's sampler, with a worker", writer="body", own_loader=True)
def samplers_generator(job: Job) -> State:
    draws = torch.Generator().manual_seed(5)
    rows = [row * factor for row in job.batches for factor in (1, 2, 3, 4, 5)]
    sampler = RandomSampler(rows, replacement=True, num_samples=40, generator=draws)
    loader = DataLoader(Rows(rows), batch_size=None, sampler=sampler, num_workers=1)
    return State(
        lambda: 1.0,
        lambda number: torch.rand((), generator=draws),
        loader,
        shown=lambda: draws.get_state().double().sum(),
    )


@state(
    "position of torchdata's loader, with a worker", reader="body", writer="loader", own_loader=True
)
def loaders_position(job: Job) -> State:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Rows(job.batches), batch_size=None, num_workers=1)
    return State(
        lambda: float(loader.state_dict()["_snapshot"]["_snapshot_step"]),
        lambda number: None,
        loader,
        shown=lambda: 0.0,
    )


@state("iterator that the body skips in", writer="body", when="fourth", own_loader=True)
def skipped(job: Job) -> State:
    batches = iter(job.batches * 2)
    return State(lambda: 1.0, lambda number: next(batches, None), batches)


@state("list that the body changes", writer="body", own_loader=True)
def changed_list(job: Job) -> State:
    batches = list(job.batches)

    def write(number: int) -> None:
        if number + 1 < len(batches):
            batches[number + 1] = batches[number + 1] * 2

    return State(lambda: 1.0, write, batches, shown=lambda: torch.stack(batches))


@state("list that a task adds to", when="fourth", own_loader=True)
def longer_list(job: Job) -> State:
    batches = list(job.batches)
    return State(lambda: 1.0, lambda number: batches.append(batches[number] * 2), batches)


@state("one buffer for all batches", reader="train", own_loader=True)
def one_buffer(job: Job) -> State:
    buffer = torch.zeros(4)

    def batches() -> Iterator[Tensor]:
        for batch in job.batches:
            buffer.copy_(batch)
            yield buffer

    return State(lambda: float(buffer.sum()), lambda number: buffer.mul_(2.0), batches())

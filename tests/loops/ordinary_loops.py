"""Ordinary training loops, as their users write them: a loader, functions, and a loop's body.

``LOOPS`` has them by name. Each is made anew by a function, so that it can be run twice from the
same beginning: as a plain loop, and overlapped.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import swpipe

Fn = Callable[[Any], None]
ROWS = 22  # the last batch of 4 has 2


class StopTraining(Exception):
    """The body leaves the loop."""


@dataclass
class Loop:
    """A loop.

    Attributes:
        loader: What it iterates over.
        functions: Called on each context, in this order.
        state: Returns all that the loop trains, counts and keeps.
        epochs: How many passes over the loader.
        body: Called with each context after all functions; may raise ``StopTraining``.
        after_epoch: Called after each pass.
    """

    loader: Iterable[Any]
    functions: list[Fn]
    state: Callable[[], Any]
    epochs: int = 1
    body: Fn = lambda ctx: None
    after_epoch: Callable[[], object] = lambda: None


class Rows(Dataset[Tensor]):
    """Rows of random numbers, made once."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(5)
        self.rows = torch.randn(ROWS, 4, generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class NoisyRows(Rows):
    """Rows with random augmentation, drawn when they are read."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + 0.1 * random.random() * torch.rand(4)


class HarderRows(Rows):
    """Rows that training makes harder as it goes on."""

    level = 1.0

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * self.level


class Stream(IterableDataset[Tensor]):
    """Rows one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from Rows().rows


def batches(rows: Dataset[Tensor] | None = None, **options: Any) -> DataLoader[Tensor]:
    """Batches of 4 rows."""
    return DataLoader(rows or Rows(), **{"batch_size": 4, **options})


@dataclass
class Training:
    """The usual parts of a loop; a loop replaces some of them.

    Attributes:
        model: From 4 numbers to 1.
        optimizer: Of all its parameters.
        kept: Whatever else the loop keeps, for ``state``.
    """

    model: Any = field(
        default_factory=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    )
    optimizer: Any = None
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch * 2

    def forward(self, ctx: Any) -> None:
        ctx.loss = (self.model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()

    def backward(self, ctx: Any) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: Any) -> None:
        self.optimizer.step()

    def functions(self, **others: Fn) -> list[Fn]:
        usual: dict[str, Fn] = {
            "decode": self.decode,
            "forward": self.forward,
            "backward": self.backward,
            "step": self.step,
        }
        found = usual | others
        for name, function in others.items():
            function.__name__ = name
        return list(found.values())

    def tasks(self, **others: Fn) -> list[Any]:
        """The same, with decode declared."""
        decode, *rest = self.functions(**others)
        return [swpipe.task(pure=True)(decode), *rest]

    def state(self) -> Any:
        kept = [one.state_dict() if isinstance(one, nn.Module) else one for one in self.kept]
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), kept])

    def loop(self, loader: Any = None, *, rest: dict[str, Any] | None = None, **others: Fn) -> Loop:
        loader = batches() if loader is None else loader
        return Loop(loader, self.functions(**others), self.state, **(rest or {}))


LOOPS: dict[str, Callable[[], Loop]] = {}


def ordinary(make: Callable[[], Loop]) -> Callable[[], Loop]:
    """Add a loop, by the name of its function."""
    LOOPS[make.__name__.replace("_", " ")] = make
    return make


# ----------------------------------------------------------------------------------- loaders


@ordinary
def a_list() -> Loop:
    return Training().loop(list(Rows().rows.split(4)), rest={"epochs": 2})


@ordinary
def a_generator() -> Loop:
    return Training().loop(row * 2 for row in Rows().rows.split(4))


@ordinary
def a_plain_loader() -> Loop:
    return Training().loop(rest={"epochs": 2})


@ordinary
def a_shuffled_loader() -> Loop:
    return Training().loop(batches(shuffle=True), rest={"epochs": 2})


@ordinary
def a_loader_with_workers() -> Loop:
    return Training().loop(batches(num_workers=2, shuffle=True), rest={"epochs": 2})


@ordinary
def persistent_workers() -> Loop:
    loader = batches(num_workers=1, persistent_workers=True)
    return Training().loop(loader, rest={"epochs": 2})


@ordinary
def an_iterable_dataset() -> Loop:
    return Training().loop(batches(Stream()), rest={"epochs": 2})


@ordinary
def drop_last() -> Loop:
    return Training().loop(batches(drop_last=True))


@ordinary
def a_single_batch() -> Loop:
    return Training().loop(batches(batch_size=ROWS), rest={"epochs": 3})


@ordinary
def augmentation_in_the_loader() -> Loop:
    return Training().loop(batches(NoisyRows()), rest={"epochs": 2})


@ordinary
def augmentation_and_dropout() -> Loop:
    """Loader and forward draw from one generator: a batch must be pulled after the forward."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1))
    return Training(model).loop(batches(NoisyRows()))


@ordinary
def noise_in_a_map_and_dropout() -> Loop:
    """The same, with a function of torch that no code of the loop's author names."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1))
    return Training(model).loop(map(torch.rand_like, Rows().rows.split(4)))


@ordinary
def a_hidden_draw_and_dropout() -> Loop:
    """Nothing says that the loader draws: it shows with the second batch."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1))
    return Training(model).loop(map(operator.methodcaller("bernoulli", 0.5), Rows().rows.split(4)))


@ordinary
def a_curriculum() -> Loop:
    """A task changes what the dataset returns from then on."""
    rows = HarderRows()

    def harder(ctx: Any) -> None:
        rows.level *= 1.1

    return Training().loop(batches(rows), harder=harder)


@ordinary
def a_curriculum_in_a_generator() -> Loop:
    rows = HarderRows()

    def harder(ctx: Any) -> None:
        rows.level *= 1.1

    return Training().loop((part * rows.level for part in rows.rows.split(4)), harder=harder)


@ordinary
def a_curriculum_in_a_map() -> Loop:
    rows = HarderRows()

    def harder(ctx: Any) -> None:
        rows.level *= 1.1

    loader = map(lambda part: part * rows.level, rows.rows.split(4))  # noqa: C417
    return Training().loop(loader, harder=harder)


# ----------------------------------------------------------------------------- accumulation


def _accumulating(every: int) -> Loop:
    parts = Training()
    seen = 0

    def backward(ctx: Any) -> None:
        (ctx.loss / every).backward()

    def step(ctx: Any) -> None:
        nonlocal seen
        seen += 1
        if seen % every == 0:
            parts.optimizer.step()
            parts.optimizer.zero_grad()

    return parts.loop(backward=backward, step=step, rest={"epochs": 2})


@ordinary
def accumulation_by_1() -> Loop:
    return _accumulating(1)


@ordinary
def accumulation_by_3() -> Loop:
    return _accumulating(3)


@ordinary
def accumulation_by_4_iterations() -> Loop:
    parts = Training()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    def step(ctx: Any) -> None:
        if (ctx.iter_idx + 1) % 4 == 0:
            parts.optimizer.step()
            parts.optimizer.zero_grad()

    return parts.loop(backward=backward, step=step, rest={"epochs": 2})


# ------------------------------------------------------------------------ rates and gradients


@ordinary
def a_scheduler_per_step() -> Loop:
    parts = Training()
    schedule = LambdaLR(parts.optimizer, lambda step: 0.9**step)
    return parts.loop(schedule=lambda ctx: schedule.step())


@ordinary
def a_scheduler_per_epoch() -> Loop:
    parts = Training()
    schedule = StepLR(parts.optimizer, 1, 0.5)
    return parts.loop(rest={"epochs": 3, "after_epoch": schedule.step})


@ordinary
def a_scheduler_by_loss() -> Loop:
    parts = Training()
    schedule = ReduceLROnPlateau(parts.optimizer, patience=0)
    return parts.loop(schedule=lambda ctx: schedule.step(ctx.loss.item()), rest={"epochs": 2})


@ordinary
def a_rate_lowered_on_a_new_best() -> Loop:
    parts = Training()
    best = [float("inf")]

    def lower(ctx: Any) -> None:
        if ctx.loss.item() < best[0]:
            best[0] = ctx.loss.item()
            parts.optimizer.param_groups[0]["lr"] *= 0.9

    parts.kept.append(best)
    return parts.loop(lower=lower)


@ordinary
def clipping_by_norm() -> Loop:
    parts = Training()

    def step(ctx: Any) -> None:
        ctx.norm = nn.utils.clip_grad_norm_(parts.model.parameters(), 0.1)
        parts.optimizer.step()

    return parts.loop(step=step)


@ordinary
def clipping_by_value() -> Loop:
    parts = Training()

    def backward(ctx: Any) -> None:
        parts.optimizer.zero_grad(set_to_none=False)
        ctx.loss.backward()

    def clip(ctx: Any) -> None:
        nn.utils.clip_grad_value_(parts.model.parameters(), 0.05)

    loop = parts.loop(backward=backward, clip=clip)
    loop.functions.append(loop.functions.pop(3))  # the step comes last
    return loop


@ordinary
def bfloat16_autocast() -> Loop:
    parts = Training()

    def forward(ctx: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ctx.loss = parts.model(ctx.x).float().square().mean()

    return parts.loop(forward=forward)


@ordinary
def a_gradient_scaler() -> Loop:
    parts = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def backward(ctx: Any) -> None:
        parts.optimizer.zero_grad()
        scaler.scale(ctx.loss).backward()

    def step(ctx: Any) -> None:
        scaler.unscale_(parts.optimizer)
        nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
        scaler.step(parts.optimizer)
        scaler.update()

    return parts.loop(backward=backward, step=step)


@ordinary
def lbfgs() -> Loop:
    model = nn.Linear(4, 1)
    parts = Training(model, torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3))

    def step(ctx: Any) -> None:
        def closure() -> Tensor:
            parts.optimizer.zero_grad()
            loss: Tensor = parts.model(ctx.x).square().mean()
            loss.backward()
            return loss

        parts.optimizer.step(closure)

    return parts.loop(step=step)


# ---------------------------------------------------------------------------------- models


@ordinary
def dropout() -> Loop:
    return Training(nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1))).loop()


@ordinary
def batch_norm() -> Loop:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    return Training(model).loop(rest={"epochs": 2})


@ordinary
def in_place_activations() -> Loop:
    return Training(nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 1))).loop()


@ordinary
def a_sparse_embedding() -> Loop:
    table, head = nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 1)
    model = nn.ModuleList([table, head])
    parts = Training(model, torch.optim.SparseAdam(table.parameters(), 0.1))

    def decode(ctx: Any) -> None:
        ctx.ids = ctx.batch.abs().mul(3).long().clamp(0, 8)

    def forward(ctx: Any) -> None:
        ctx.loss = head(table(ctx.ids)).square().mean()

    return parts.loop(decode=decode, forward=forward)


@ordinary
def tied_weights() -> Loop:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    parts = Training(model)

    def forward(ctx: Any) -> None:
        ctx.loss = (parts.model(ctx.x) - ctx.x).square().mean()

    return parts.loop(forward=forward)


@ordinary
def a_forward_hook() -> Loop:
    parts = Training()
    means: list[float] = []
    parts.model[1].register_forward_hook(lambda m, given, out: means.append(out.mean().item()))
    parts.kept.append(means)
    return parts.loop()


@ordinary
def a_gradient_hook() -> Loop:
    parts = Training()
    parts.model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return parts.loop()


@ordinary
def two_optimizers() -> Loop:
    parts = Training()
    first = torch.optim.SGD(parts.model[0].parameters(), 0.05)
    second = torch.optim.Adam(parts.model[2].parameters(), 0.05)

    def step(ctx: Any) -> None:
        first.step()
        if ctx.iter_idx % 2:
            second.step()

    return parts.loop(step=step)


@ordinary
def an_adversarial_pair() -> Loop:
    maker = nn.Linear(4, 4)
    parts = Training()
    improve = torch.optim.Adam(maker.parameters(), 0.01)
    parts.kept.append(maker)

    def judge(ctx: Any) -> None:
        ctx.made = maker(torch.randn_like(ctx.x))
        ctx.loss = parts.model(ctx.x).mean() - parts.model(ctx.made.detach()).mean()

    def fool(ctx: Any) -> None:
        improve.zero_grad()
        ctx.fooled = parts.model(ctx.made).mean()
        ctx.fooled.backward()
        improve.step()

    return parts.loop(forward=judge, fool=fool)


@ordinary
def teacher_and_student() -> Loop:
    parts = Training()
    teacher = copy.deepcopy(parts.model).requires_grad_(False).eval()

    def teach(ctx: Any) -> None:
        with torch.no_grad():
            ctx.target = teacher(ctx.batch)

    def forward(ctx: Any) -> None:
        ctx.loss = (parts.model(ctx.x) - ctx.target).square().mean()

    return parts.loop(decode=lambda ctx: (teach(ctx), parts.decode(ctx))[1], forward=forward)


@ordinary
def a_momentum_teacher() -> Loop:
    parts = Training()
    teacher = copy.deepcopy(parts.model).requires_grad_(False)
    parts.kept.append(teacher)

    def forward(ctx: Any) -> None:
        ctx.loss = (parts.model(ctx.x) - teacher(ctx.batch)).square().mean()

    def follow(ctx: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), parts.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    return parts.loop(forward=forward, follow=follow)


@ordinary
def an_average_of_weights() -> Loop:
    parts = Training()
    average = AveragedModel(parts.model)
    parts.kept.append(average)
    return parts.loop(average=lambda ctx: average.update_parameters(parts.model))


@ordinary
def freezing_at_an_iteration() -> Loop:
    parts = Training()

    def freeze(ctx: Any) -> None:
        if ctx.iter_idx == 3:
            parts.model[0].requires_grad_(False)

    return parts.loop(freeze=freeze)


@ordinary
def a_weight_that_is_replaced() -> Loop:
    parts = Training()

    def replace(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            parts.model[0].weight.data = parts.model[0].weight.data * 0.5

    return parts.loop(replace=replace)


# ---------------------------------------------------- evaluation, checkpoints, counts, the end


def _score(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        score: Tensor = model(Rows().rows[:5]).sum()
    model.train()
    return score


@ordinary
def evaluation_as_a_task() -> Loop:
    parts = Training(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))

    def evaluate(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            parts.kept.append(_score(parts.model))

    return parts.loop(evaluate=evaluate)


@ordinary
def evaluation_in_the_body() -> Loop:
    parts = Training(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))

    def body(ctx: Any) -> None:
        if ctx.iter_idx % 2:
            parts.kept.append(_score(parts.model))

    return parts.loop(rest={"body": body})


@ordinary
def checkpoints_as_a_task() -> Loop:
    parts = Training()

    def save(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            parts.kept.append(copy.deepcopy(parts.model.state_dict()))

    return parts.loop(save=save)


@ordinary
def checkpoints_in_the_body() -> Loop:
    parts = Training()

    def body(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            parts.kept.append(copy.deepcopy(parts.optimizer.state_dict()))

    return parts.loop(rest={"body": body})


@ordinary
def an_early_stop() -> Loop:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def body(ctx: Any) -> None:
        if ctx.iter_idx == 2:
            raise StopTraining

    return Training(model).loop(rest={"body": body})


@ordinary
def patience() -> Loop:
    parts = Training()
    best, waited = float("inf"), 0

    def body(ctx: Any) -> None:
        nonlocal best, waited
        waited = 0 if ctx.loss.item() < best else waited + 1
        best = min(best, ctx.loss.item())
        parts.kept.append(waited)
        if waited == 2:
            raise StopTraining

    return parts.loop(rest={"body": body, "epochs": 3})


class Mean:
    """A metric, as a user writes one."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, value: Tensor) -> None:
        self.total = self.total + value
        self.count += 1


@ordinary
def a_metric_object() -> Loop:
    parts = Training()
    mean = Mean()
    parts.kept.append(mean.__dict__)
    return parts.loop(measure=lambda ctx: mean.update(ctx.loss.detach()))


@ordinary
def a_counter_and_a_log() -> Loop:
    parts = Training()
    log: list[float] = []
    counts = {"rows": 0}
    parts.kept += [log, counts]

    def note(ctx: Any) -> None:
        log.append(ctx.loss.item())
        counts["rows"] += len(ctx.batch)

    return parts.loop(note=note)


_SCALES: dict[int, float] = {}


@ordinary
def a_cache_of_the_module() -> Loop:
    _SCALES.clear()
    parts = Training()
    parts.kept.append(_SCALES)

    def decode(ctx: Any) -> None:
        key = len(ctx.batch)
        if key not in _SCALES:
            _SCALES[key] = float(ctx.batch.abs().max())
        ctx.x = ctx.batch / _SCALES[key]

    return parts.loop(decode=decode)


@ordinary
def a_reset_of_the_momentum() -> Loop:
    parts = Training()

    def forget(ctx: Any) -> None:
        if ctx.iter_idx % 4 == 3:
            parts.optimizer.state.clear()

    return parts.loop(forget=forget)

"""Ordinary scripts about loaders: what they count, draw, keep and read, and how they are left.

Each takes ``over``, which makes an iterable of contexts of a loader and functions: a plain loop, or
``swpipe.overlap``. It returns all numbers that the script has.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Sampler

from tests.loops.ordinary_loops import ROWS, Fn, Rows, Training, batches

Over = Callable[[Any, list[Fn]], Any]
Script = Callable[[Over], Any]
PARTS = Rows().rows.split(4)

AHEAD: dict[str, Script] = {}
SERIAL: dict[str, tuple[Script, str]] = {}
REFUSED: dict[str, tuple[Script, str]] = {}


def ahead(script: Script) -> Script:
    """The loader runs ahead, and the numbers are the same."""
    AHEAD[script.__name__.replace("_", " ")] = script
    return script


def serial(why: str) -> Callable[[Script], Script]:
    """Nothing runs ahead, a warning says why, and the numbers are the same."""

    def add(script: Script) -> Script:
        SERIAL[script.__name__.replace("_", " ")] = script, why
        return script

    return add


def refused(why: str) -> Callable[[Script], Script]:
    """An error says why."""

    def add(script: Script) -> Script:
        REFUSED[script.__name__.replace("_", " ")] = script, why
        return script

    return add


def train(
    over: Over,
    loader: Any,
    parts: Training | None = None,
    *,
    epochs: int = 1,
    body: Fn = lambda ctx: None,
    before_epoch: Callable[[int], object] = lambda epoch: None,
    every: int = 0,
    **functions: Fn,
) -> Any:
    """Some epochs; each is left after every so many iterations."""
    parts = parts or Training()
    losses, seen = [], 0
    with over(loader, parts.functions(**functions)) as loop:
        for epoch in range(epochs):
            before_epoch(epoch)
            for ctx in loop:
                losses.append(ctx.loss.item())
                body(ctx)
                seen += 1
                if every and seen % every == 0:
                    break
    return [losses, parts.state()]


def keep(parts: Training, read: Callable[[], Any]) -> Fn:
    """A body that keeps what ``read`` returns."""
    return lambda ctx: parts.kept.append(read())


# ------------------------------------------------------------- what the loader says of its batch


class Counting:
    """Says which batch it gave."""

    def __init__(self, inner: Iterable[Tensor]) -> None:
        self.inner, self.index, self.is_last = inner, -1, False

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tensor]:
        self.index = -1
        for batch in self.inner:
            self.index += 1
            self.is_last = self.index == len(self) - 1
            yield batch


class SeenRows(Rows):
    """Counts and names the rows that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.ids = 0, list[int]()

    def __getitem__(self, index: int) -> Tensor:
        self.seen += 1
        self.ids.append(index)
        return super().__getitem__(index)


@ahead
def the_body_asks_for_the_last_batch(over: Over) -> Any:
    parts, loader = Training(), Counting(batches())
    return train(
        over, loader, parts, epochs=2, body=keep(parts, lambda: (loader.index, loader.is_last))
    )


@ahead
def the_body_asks_for_the_rows_read(over: Over) -> Any:
    parts, rows = Training(), SeenRows()
    read = keep(parts, lambda: (rows.seen, list(rows.ids)))
    return train(over, batches(rows, shuffle=True), parts, epochs=2, body=read)


@ahead
def the_body_reads_a_variable_of_a_generator(over: Over) -> Any:
    number, parts = -1, Training()

    def loader() -> Iterator[Tensor]:
        nonlocal number
        for number, part in enumerate(PARTS):  # noqa: B007
            yield part

    return train(over, loader(), parts, body=keep(parts, lambda: number))


@ahead
def a_counter_after_the_loop_was_left(over: Over) -> Any:
    loader = Counting(batches())
    return [train(over, loader, every=3), loader.index]


@ahead
def the_body_reads_counts_by_row(over: Over) -> Any:
    """``Counter.update`` counts the pairs that another dict's ``update`` sets."""

    class CountedRows(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counter[int]()

        def __getitem__(self, index: int) -> Tensor:
            self.counts[index % 3] += 1
            return super().__getitem__(index)

    parts, rows = Training(), CountedRows()
    read = keep(parts, lambda: sorted(rows.counts.items()))
    return train(over, batches(rows), parts, epochs=2, body=read)


@dataclass(slots=True)
class Slots:
    """Has its attributes in slots."""

    seen: int = 0
    level: float = 1.0


@ahead
def the_body_reads_a_count_in_a_slot(over: Over) -> Any:
    parts, slots = Training(), Slots()

    class CountedRows(Rows):
        def __getitem__(self, index: int) -> Tensor:
            slots.seen += 1
            return super().__getitem__(index)

    body = keep(parts, lambda: slots.seen)
    return [train(over, batches(CountedRows()), parts, body=body, every=3), slots.seen]


@ahead
def the_body_reads_a_slot_beside_other_attributes(over: Over) -> Any:
    class Numbered(Sampler[int]):
        __slots__ = ("number",)

        def __iter__(self) -> Iterator[int]:
            for self.number in range(ROWS):
                yield self.number

        def __len__(self) -> int:
            return ROWS

    parts, sampler = Training(), Numbered()
    body = keep(parts, lambda: sampler.number)
    return train(over, batches(sampler=sampler), parts, body=body)


@refused("the body of the loop changed slots.level")
def a_slot_that_the_body_changes(over: Over) -> Any:
    slots = Slots()

    class LeveledBySlot(Rows):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) * slots.level

    def body(ctx: Any) -> None:
        slots.level *= 1.1

    return train(over, batches(LeveledBySlot()), body=body)


@ahead
def the_body_reads_what_each_pass_makes_anew(over: Over) -> Any:
    """In every pass these are other objects."""

    class Progress:
        def __iter__(self) -> Iterator[Tensor]:
            self.seen = seen = {"count": 0}
            for batch in batches():
                seen["count"] += 1
                yield batch

    parts, loader = Training(), Progress()
    body = keep(parts, lambda: dict(loader.seen))
    return train(over, loader, parts, epochs=3, body=body)


@serial("The loader changes is_last, which 'step' may use")
def a_task_asks_for_a_flag_that_is_set_late(over: Over) -> Any:
    parts, loader = Training(), Counting(batches())

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    def step(ctx: Any) -> None:
        if loader.is_last:
            parts.optimizer.step()
            parts.optimizer.zero_grad()

    return train(over, loader, parts, epochs=2, backward=backward, step=step)


@serial("The loader changes (index|is_last), which 'step' may use")
def a_task_asks_for_the_last_batch(over: Over) -> Any:
    parts, loader = Training(), Counting(batches())

    def step(ctx: Any) -> None:
        if loader.is_last or loader.index % 4 == 3:
            parts.optimizer.step()

    return train(over, loader, parts, epochs=2, step=step)


@serial("The loader changes number, which 'note' may use")
def a_task_reads_a_variable_of_a_generator(over: Over) -> Any:
    number, parts = -1, Training()

    def loader() -> Iterator[Tensor]:
        nonlocal number
        for number, part in enumerate(PARTS):  # noqa: B007
            yield part

    def note(ctx: Any) -> None:
        ctx.number = number

    body: Fn = lambda ctx: parts.kept.append(ctx.number)  # noqa: E731
    return train(over, loader(), parts, body=body, note=note)


@serial("The loader changes means, which 'decode' may use")
def a_task_uses_what_collate_keeps(over: Over) -> Any:
    parts, means = Training(), torch.zeros(4)

    def collate(rows: list[Tensor]) -> Tensor:
        means.copy_(torch.stack(rows).mean(0))
        return torch.stack(rows)

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch - means

    return train(over, batches(collate_fn=collate), parts, decode=decode)


@serial("The loader modifies means in place")
def the_body_may_use_a_tensor_that_collate_keeps(over: Over) -> Any:
    parts, means = Training(), torch.zeros(4)

    def collate(rows: list[Tensor]) -> Tensor:
        means.lerp_(torch.stack(rows).mean(0), 0.1)
        return torch.stack(rows)

    return train(over, batches(collate_fn=collate), parts, body=keep(parts, means.clone))


@ahead
def a_task_asks_for_lengths(over: Over) -> Any:
    """A length changes with nothing that the loader does."""
    parts, loader = Training(), Counting(batches())

    def step(ctx: Any) -> None:
        rate = 1 - ctx.iter_idx / (2 * len(loader) * len(loader.inner.dataset))  # type: ignore[attr-defined]
        parts.optimizer.param_groups[0]["lr"] = 0.05 * rate
        parts.optimizer.step()

    return train(over, loader, parts, epochs=2, step=step)


# ------------------------------------------------------------- what the loader reads


class LeveledRows(Rows):
    """Rows of some difficulty."""

    level = 1.0

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * self.level


def _leveled(over: Over, wrapped: Callable[[Any], Any], task: bool) -> Any:
    rows, parts = LeveledRows(), Training()

    def harder(ctx: Any) -> None:
        rows.level *= 1.1

    options: dict[str, Any] = {"harder": harder} if task else {"body": harder}
    return train(over, wrapped(rows), parts, **options)


def _bar(rows: Any) -> Any:
    import tqdm

    return tqdm.tqdm(batches(rows), disable=True)


def _stateful(rows: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows, batch_size=4)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "a DataLoader": batches,
    "a progress bar": _bar,
    "a StatefulDataLoader": _stateful,
    "a generator": lambda rows: (batch for batch in batches(rows)),
    "a chain": lambda rows: itertools.chain(batches(rows), batches(rows)),
    "datasets in a row": lambda rows: batches(ConcatDataset([rows, rows])),
    "a map": lambda rows: map(torch.neg, batches(rows)),
}
for _name, _wrapped in WRAPPERS.items():
    SERIAL[f"a task changes what {_name} reads"] = (
        lambda over, wrapped=_wrapped: _leveled(over, wrapped, task=True),
        "The loader and 'harder' may both use .*level",
    )
    REFUSED[f"the body changes what {_name} reads"] = (
        lambda over, wrapped=_wrapped: _leveled(over, wrapped, task=False),
        "the body of the loop changed .*level",
    )


@ahead
def a_body_that_changes_the_dataset_of_workers(over: Over) -> Any:
    """They have read a copy of it since the pass began."""
    return _leveled(over, lambda rows: batches(rows, num_workers=1), task=False)


@ahead
def a_change_between_passes(over: Over) -> Any:
    rows = LeveledRows()

    def harder(epoch: int) -> None:
        rows.level = 2.0 + epoch  # also before the first pass, which has begun

    return train(over, batches(rows, shuffle=True), epochs=3, before_epoch=harder)


@ahead
def an_epoch_that_is_set(over: Over) -> Any:
    sampler = DistributedSampler(Rows(), num_replicas=2, rank=0)
    set_epoch: Callable[[int], object] = lambda epoch: sampler.set_epoch(epoch + 3)  # noqa: E731
    return train(over, batches(sampler=sampler), epochs=3, before_epoch=set_epoch)


class TransformedRows(Rows):
    """Rows with a transform that may be set."""

    transform: Any = None

    def __getitem__(self, index: int) -> Tensor:
        row = super().__getitem__(index)
        return row if self.transform is None else self.transform(row)


class CountedTransform:
    """Counts the rows, and keeps their sums."""

    def __init__(self, scale: float) -> None:
        self.scale, self.count, self.sums = scale, 0, list[float]()

    def __call__(self, row: Tensor) -> Tensor:
        self.count += 1
        self.sums.append(float(row.sum()))
        return row * self.scale


@ahead
def a_transform_that_is_set_between_passes(over: Over) -> Any:
    """The body finds what it counts and keeps."""
    rows, parts = TransformedRows(), Training()

    def body(ctx: Any) -> None:
        if (one := rows.transform) is not None:
            parts.kept.append((one.count, list(one.sums)))

    def set_transform(epoch: int) -> None:
        rows.transform = CountedTransform(1.0 + epoch) if epoch else None

    return train(over, batches(rows), parts, epochs=3, body=body, before_epoch=set_transform)


@refused("the body of the loop changed transform.scale")
def a_transform_that_is_set_between_passes_and_changed_by_the_body(over: Over) -> Any:
    rows = TransformedRows()

    def set_transform(epoch: int) -> None:
        rows.transform = CountedTransform(1.0 + epoch)

    def body(ctx: Any) -> None:
        rows.transform.scale *= 1.1

    return train(over, batches(rows), epochs=2, body=body, before_epoch=set_transform)


@ahead
def what_a_loop_changes_between_passes(over: Over) -> Any:
    """Modes, rates, weights, parameters that train, and data: none changes what may run ahead."""
    norm = torch.nn.BatchNorm1d(6)
    parts = Training(torch.nn.Sequential(torch.nn.Linear(4, 6), norm, torch.nn.Linear(6, 1)))
    parts.model.eval()
    parts.model[0].requires_grad_(False)
    rows = TransformedRows()

    def before_epoch(epoch: int) -> None:
        parts.model.train(epoch != 1)
        parts.model[0].requires_grad_(epoch > 1)
        parts.optimizer.param_groups[0]["lr"] = 0.05 / (1 + epoch)
        with torch.no_grad():
            parts.model[2].weight.mul_(0.5)
        rows.rows = rows.rows + epoch
        parts.optimizer.state.clear()

    return train(over, batches(rows, shuffle=True), parts, epochs=4, before_epoch=before_epoch)


def _before_second(change: Callable[[], object]) -> Callable[[int], object]:
    """What is done before the second epoch."""
    return lambda epoch: change() if epoch == 1 else None


def _frozen(over: Over, change: Callable[[Training, Any], object], *, in_body: bool = False) -> Any:
    """Features of a frozen module, made ahead."""
    parts, frozen = Training(), torch.nn.BatchNorm1d(4).eval().requires_grad_(False)
    decode: Fn = lambda ctx: setattr(ctx, "x", frozen(ctx.batch))  # noqa: E731
    body: Fn = lambda ctx: change(parts, frozen) if in_body else None  # noqa: E731
    between = _before_second(lambda: None if in_body else change(parts, frozen))
    return train(over, batches(), parts, epochs=2, decode=decode, body=body, before_epoch=between)


def _unfreeze(parts: Training, frozen: Any) -> None:
    frozen.requires_grad_(True)
    parts.optimizer.add_param_group({"params": [*frozen.parameters()]})


@refused("something has changed since. Now it finds: 'decode' can reach frozen, which is trained")
def a_module_that_is_unfrozen_between_passes(over: Over) -> Any:
    return _frozen(over, _unfreeze)


@refused("the body of the loop changed frozen")
def a_module_that_is_unfrozen_in_the_body(over: Over) -> Any:
    return _frozen(over, _unfreeze, in_body=True)


@refused("'decode' can reach frozen, which is in training mode")
def a_module_whose_mode_changes_between_passes(over: Over) -> Any:
    return _frozen(over, lambda parts, frozen: frozen.train())


@refused("'forward' draws from torch's default generators, and the loader's code may draw")
def a_transform_that_draws_beside_dropout(over: Over) -> Any:
    rows = TransformedRows()
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(4, 1))
    noisy = _before_second(lambda: setattr(rows, "transform", lambda row: row * torch.rand(4)))
    return train(over, batches(rows), Training(model), epochs=2, before_epoch=noisy)


class LateNoise(Rows):
    """Rows of which only the last are drawn."""

    def __getitem__(self, index: int) -> Tensor:
        row = super().__getitem__(index)
        return row + torch.rand(4) if index > 12 else row


def _dropout(over: Over, rate: float, change: Callable[[Any], object], training: bool) -> Any:
    dropout = torch.nn.Dropout(rate)
    model = torch.nn.Sequential(dropout, torch.nn.Linear(4, 1)).train(training)
    before = lambda epoch: change(dropout)  # noqa: E731
    return train(over, batches(LateNoise()), Training(model), before_epoch=before)


@refused("'forward' draws from torch's default generators, and the loader's code may draw")
def a_model_that_is_put_into_training_after_the_recording(over: Over) -> Any:
    return _dropout(over, 0.5, lambda dropout: dropout.train(), training=False)


@refused("'forward' draws from torch's default generators, and the loader's code may draw")
def a_rate_of_dropout_that_is_raised_after_the_recording(over: Over) -> Any:
    return _dropout(over, 0.0, lambda dropout: setattr(dropout, "p", 0.5), training=True)


@refused("'decode' changes .*transform.count")
def a_transform_of_decode_that_counts_in_later_passes(over: Over) -> Any:
    rows = TransformedRows()
    rows.transform = torch.neg
    between = _before_second(lambda: setattr(rows, "transform", CountedTransform(2.0)))
    decode: Fn = lambda ctx: setattr(ctx, "x", rows.transform(ctx.batch))  # noqa: E731
    return train(over, batches(), epochs=2, decode=decode, before_epoch=between)


@refused("'decode' draws from Python's default generator")
def a_function_of_decode_that_draws_in_later_passes(over: Over) -> Any:
    class Noise:
        scale = staticmethod(lambda: 1.0)

    drawn = staticmethod(lambda: random.random() + 1)
    noisy = _before_second(lambda: setattr(Noise, "scale", drawn))
    decode: Fn = lambda ctx: setattr(ctx, "x", ctx.batch * Noise.scale())  # noqa: E731
    return train(over, batches(), epochs=2, decode=decode, before_epoch=noisy)


@refused("the loader can reach transform.level, which 'harder' may change")
def a_curriculum_that_the_loader_gets_between_passes(over: Over) -> Any:
    class Level:
        level = 1.0

        def __call__(self, row: Tensor) -> Tensor:
            return row * self.level

    rows, level = TransformedRows(), Level()

    def harder(ctx: Any) -> None:
        level.level *= 1.1

    between = _before_second(lambda: setattr(rows, "transform", level))
    return train(over, batches(rows), epochs=2, harder=harder, before_epoch=between)


@refused("the loader can reach model.*, which is trained")
def a_model_that_the_loader_gets_between_passes(over: Over) -> Any:
    class Labeled(Rows):
        model: Any = None

        def __getitem__(self, index: int) -> Tensor:
            row = super().__getitem__(index)
            return row if self.model is None else row * self.model(row).detach()

    rows, parts = Labeled(), Training()
    between = _before_second(lambda: setattr(rows, "model", parts.model))
    return train(over, batches(rows), parts, epochs=2, before_epoch=between)


@refused("the body of the loop changed .*memory")
def a_replay_buffer_of_the_body(over: Over) -> Any:
    memory = deque(PARTS[0], maxlen=4)

    def loader() -> Iterator[Tensor]:
        for number in range(8):
            yield torch.stack([memory[(number + k) % 4] for k in range(3)])

    return train(over, loader(), body=lambda ctx: memory.append(ctx.x[0] * ctx.loss.item()))


@serial("The loader and 'mine' may both use an array")
def weights_in_an_array(over: Over) -> Any:
    """Also the recording's changes are undone."""
    weights = np.ones(ROWS)

    class Weighted(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            draws = np.random.default_rng(3)
            for _ in range(5):
                yield draws.choice(ROWS, 4, p=weights / weights.sum()).tolist()

    def mine(ctx: Any) -> None:
        weights[:4] += ctx.loss.item()

    loader = DataLoader(Rows(), batch_sampler=Weighted())
    return [train(over, loader, mine=mine), weights.tolist()]


@serial("The loader and 'decay' may both use an array")
def weights_that_an_attribute_has(over: Over) -> Any:
    """They are scaled in place, by an operator."""
    weights = np.ones(ROWS)

    class Weighted(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            draws = np.random.default_rng(3)
            for _ in range(5):
                yield draws.choice(ROWS, 4, p=weights / weights.sum()).tolist()

    held = SimpleNamespace(weights=weights)

    def decay(ctx: Any) -> None:
        held.weights **= 1.5

    loader = DataLoader(Rows(), batch_sampler=Weighted())
    return [train(over, loader, decay=decay), weights.tolist()]


@serial("The loader and 'count' may both use state 'Python value step'")
def a_generator_reads_what_a_task_counts(over: Over) -> Any:
    """The generator has begun, and no longer shows the cell of its variable."""
    step = 0

    def loader() -> Iterator[Tensor]:
        for part in PARTS:
            yield part * step

    def count(ctx: Any) -> None:
        nonlocal step
        step += 1

    return train(over, loader(), count=count)


# ------------------------------------------------------------- what runs ahead beside the body


@ahead
def a_count_that_decode_keeps(over: Over) -> Any:
    parts, rows = Training(), {"count": 0}

    def decode(ctx: Any) -> None:
        rows["count"] += len(ctx.batch)
        ctx.x = ctx.batch

    return train(over, batches(), parts, decode=decode, body=keep(parts, rows.copy))


@refused("the body of the loop changed scale")
def a_scale_that_the_body_changes(over: Over) -> Any:
    scale = 1.0

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch * scale

    def body(ctx: Any) -> None:
        nonlocal scale
        scale *= 0.9

    return train(over, batches(), decode=decode, body=body)


# ------------------------------------------------------------- batches that are kept


@serial("The loader uses the memory of a batch for the next one")
def one_buffer(over: Over) -> Any:
    def loader() -> Iterator[Tensor]:
        buffer = np.zeros((4, 4), np.float32)
        for part in PARTS[:5]:
            buffer[:] = part
            yield torch.from_numpy(buffer)

    return train(over, loader())


@serial("The loader uses the memory of a batch for the next one")
def one_dict(over: Over) -> Any:
    def loader() -> Iterator[dict[str, Tensor]]:
        batch = {}
        for part in PARTS:
            batch["x"] = part
            yield batch

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch["x"]

    return train(over, loader(), decode=decode)


@refused("a batch in the memory of an earlier one")
def two_buffers_in_turn(over: Over) -> Any:
    def loader() -> Iterator[Tensor]:
        buffers = [torch.zeros(4, 4), torch.zeros(4, 4)]
        for number, part in enumerate(PARTS[:5]):
            buffers[number % 2].copy_(part)
            yield buffers[number % 2]

    return train(over, loader(), decode=lambda ctx: setattr(ctx, "x", ctx.batch))


@refused("a batch in the memory of an earlier one")
def a_buffer_for_later_batches(over: Over) -> Any:
    def loader() -> Iterator[Tensor]:
        buffers = [torch.zeros(4, 4)]
        for number, part in enumerate(PARTS[:5]):
            yield buffers[0].copy_(part) if number > 1 else part

    return train(over, loader(), decode=lambda ctx: setattr(ctx, "x", ctx.batch))


@serial("'decode' modifies the batch in place, and the loader keeps it")
def batches_that_are_modified_and_kept(over: Over) -> Any:
    data = [part.clone() for part in PARTS]
    decode: Fn = lambda ctx: setattr(ctx, "x", ctx.batch.mul_(1.1))  # noqa: E731
    return [train(over, data, epochs=3, decode=decode), data]


@ahead
def batches_that_are_modified_and_not_kept(over: Over) -> Any:
    """The variable of the generator does not count."""

    def loader() -> Iterator[Tensor]:
        for batch in batches(shuffle=True):  # noqa: UP028
            yield batch

    return train(over, loader(), decode=lambda ctx: setattr(ctx, "x", ctx.batch.mul_(2)))


@refused("'decode' modifies the batch in place, and the loader keeps it while it makes the next")
def a_mix_with_the_last_batch(over: Over) -> Any:
    def mixed() -> Iterator[Tensor]:
        last = None
        for batch in [part.clone() for part in PARTS[:5]]:
            yield batch if last is None else batch + last
            last = batch

    return train(over, mixed(), decode=lambda ctx: setattr(ctx, "x", ctx.batch.mul_(2)))


@ahead
def one_batch_many_times(over: Over) -> Any:
    return train(over, [torch.ones(4, 4)] * 6, epochs=2)

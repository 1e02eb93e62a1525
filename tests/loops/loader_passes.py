"""More scripts of ``loader_loops``: random numbers, passes that are left, and errors."""

from __future__ import annotations

import csv
import io
import itertools
import random
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, normal
from torch.utils.data import ConcatDataset, IterableDataset

from tests.loops.loader_loops import PARTS, Over, ahead, keep, refused, serial, train
from tests.loops.ordinary_loops import ROWS, NoisyRows, Rows, Training, batches


def dropout() -> Training:
    """Its forward draws."""
    return Training(nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1)))


class LateRows(Rows):
    """Draws for the last rows only."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> Tensor:
        row = super().__getitem__(index)
        return row + self.draw() if index > 12 else row


# ------------------------------------------------------------------------------ random numbers


@ahead
def generators_after_loops_that_were_left(over: Over) -> Any:
    """What was drawn for batches that nobody got is drawn again."""
    parts = Training()
    after = keep(parts, lambda: (random.random(), torch.rand(1), float(np.random.rand())))
    return train(
        over, batches(NoisyRows()), parts, epochs=3, every=3, before_epoch=lambda epoch: after(None)
    )


@ahead
def a_generator_of_its_own_that_is_left(over: Over) -> Any:
    own = torch.Generator().manual_seed(3)
    loader = batches(shuffle=True, generator=own)
    return [train(over, loader, epochs=3, every=3), own.get_state()]


@ahead
def the_body_saves_the_generators(over: Over) -> Any:
    parts = Training()
    saved = keep(parts, lambda: (torch.get_rng_state(), random.getstate()))
    return train(over, batches(NoisyRows()), parts, epochs=2, body=saved)


@ahead
def the_body_draws_and_the_loader_shuffles(over: Over) -> Any:
    """It draws at the beginning of a pass only."""
    parts = dropout()
    body = keep(parts, lambda: (torch.rand(1), [len(batch) for batch in batches(shuffle=True)]))
    return train(over, batches(shuffle=True), parts, epochs=2, body=body)


@ahead
def draws_between_the_making_and_the_first_pass(over: Over) -> Any:
    parts = Training()
    with over(batches(shuffle=True), parts.functions()) as loop:
        noise = torch.randn(3)
        return [noise, [ctx.loss.item() for _ in range(2) for ctx in loop]]


@ahead
def an_iterator_that_has_shuffled_beside_dropout(over: Over) -> Any:
    """Its sampler has begun, and draws no more; the body may draw, too."""
    parts = dropout()
    body = keep(parts, lambda: torch.rand(1))
    decode = lambda ctx: setattr(ctx, "x", ctx.batch[1])  # noqa: E731
    loader = enumerate(batches(shuffle=True))
    return train(over, loader, parts, epochs=2, every=3, body=body, decode=decode)


@ahead
def two_loops_in_turn(over: Over) -> Any:
    first, second = Training(), Training()
    loaders = [batches(shuffle=True), batches(shuffle=True)]
    with over(loaders[0], first.functions()) as one, over(loaders[1], second.functions()) as two:
        pairs = [(a.loss.item(), b.loss.item()) for _ in range(2) for a, b in zip(one, two)]  # noqa: B905
    return [pairs, first.state(), second.state()]


@ahead
def a_loader_that_begins_to_draw(over: Over) -> Any:
    return train(over, batches(LateRows(np.random.rand)), epochs=2)


@ahead
def generators_of_the_dataset_beside_dropout(over: Over) -> Any:
    """Their methods are called as functions of torch that draw from its default generators."""

    class OwnNoise(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.draws, self.random = np.random.default_rng(3), random.Random(3)

        def __getitem__(self, index: int) -> Tensor:
            picked = self.random.sample(range(4), 4)
            return super().__getitem__(index)[picked] + float(self.draws.normal())

    return train(over, batches(OwnNoise()), dropout(), epochs=2)


@serial("'forward' draws from torch's default generators, and the loader's code may draw")
def generators_of_one_name_beside_dropout(over: Over) -> Any:
    """One is Python's, and the other one draws from torch's default generators."""

    class Picked(Rows):
        draws = random.Random(3)

        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(self.draws.sample(range(ROWS), 1)[0])

    class Noisy(Rows):
        draws = torch.distributions.Normal(0.0, 1.0)

        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + self.draws.sample()

    return train(over, batches(ConcatDataset([Picked(), Noisy()])), dropout())


@serial("'forward' draws from torch's default generators, and the loader's code may draw")
def a_function_called_as_a_method_of_a_generator(over: Over) -> Any:
    class Noisy(Rows):
        draws = np.random.default_rng(3)

        def __getitem__(self, index: int) -> Tensor:
            row = super().__getitem__(index) * float(self.draws.normal())
            return normal(row, 0.1) if index > 12 else row

    return train(over, batches(Noisy()), dropout())


@refused("the body of the loop changed Python's default generator")
def the_body_draws_what_the_loader_draws(over: Over) -> Any:
    parts = Training()
    return train(over, batches(NoisyRows()), parts, body=keep(parts, random.random))


@refused("the body of the loop changed (Random|Python's default generator)")
def the_body_draws_what_the_loader_begins_to_draw(over: Over) -> Any:
    parts = Training()
    return train(over, batches(LateRows(random.random)), parts, body=keep(parts, random.random))


@serial("'forward' draws from torch's default generators, and the loader's code may draw")
def a_loader_that_begins_to_draw_beside_dropout(over: Over) -> Any:
    return train(over, batches(LateRows(lambda: torch.rand(4))), dropout())


@serial("'noise' draws from Python's default generator, and the loader's code may draw")
def a_loader_that_begins_to_draw_beside_a_task(over: Over) -> Any:
    noise = lambda ctx: setattr(ctx, "x", ctx.x * random.random())  # noqa: E731
    functions = Training().functions(noise=noise)
    functions.insert(1, functions.pop())
    with over(batches(LateRows(random.random)), functions) as loop:
        return [ctx.loss.item() for ctx in loop]


@serial("'noise' draws from Python's default generator, and the loader's code may draw")
def a_task_that_begins_to_draw(over: Over) -> Any:
    def noise(ctx: Any) -> None:
        ctx.noise = random.random() if ctx.iter_idx > 2 else 0.0

    return train(over, batches(NoisyRows()), noise=noise)


# ------------------------------------------------------------------------------ passes


class Numbers:
    """Goes on where the last pass was left."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(4):
            self.position += 1
            yield torch.full((2, 4), self.position / 10)


@ahead
def a_loader_that_goes_on(over: Over) -> Any:
    numbers = Numbers()
    return [train(over, numbers, epochs=4, every=3), numbers.position]


@ahead
def an_endless_generator(over: Over) -> Any:
    numbers = (torch.full((2, 4), number / 10) for number in itertools.count())
    return train(over, numbers, epochs=4, every=5)


@ahead
def an_endless_generator_of_passes(over: Over) -> Any:
    """It is left where the next pass has drawn its seed ahead."""

    def endless() -> Iterator[Tensor]:
        loader = batches(shuffle=True)
        while True:
            yield from loader

    return [train(over, endless(), every=6), torch.rand(1)]


@ahead
def an_iterator_that_is_left_and_ended(over: Over) -> Any:
    return [train(over, iter(batches(shuffle=True)), epochs=3, every=4)]


@ahead
def lines_of_a_file(over: Over) -> Any:
    lines = io.StringIO("\n".join(",".join(map(str, row.tolist())) for row in Rows().rows))
    decode = lambda ctx: setattr(ctx, "x", torch.tensor([[*map(float, ctx.batch)]]))  # noqa: E731
    return train(over, csv.reader(lines), epochs=3, every=4, decode=decode)


@refused("tasks that ran ahead have modified batches that were dropped")
def an_iterator_whose_batches_were_modified(over: Over) -> Any:
    parts = (part.clone() for part in PARTS)
    double = lambda ctx: setattr(ctx, "x", ctx.batch.mul_(2))  # noqa: E731
    return train(over, parts, epochs=2, every=2, decode=double)


@ahead
def a_progress_bar_around_the_loader(over: Over) -> Any:
    """The body sees its count; what a thread of the bar changes is no change by the body."""
    import tqdm

    parts = Training()
    bar = tqdm.tqdm(batches(), file=io.StringIO(), mininterval=0, miniters=1)

    def body(ctx: Any) -> None:
        parts.kept.append(bar.n)
        bar.miniters = 1.0 if len(parts.kept) % 2 else 1
        bar.set_postfix(loss=ctx.loss.item())

    return train(over, bar, parts, body=body)


@ahead
def a_shuffle_buffer(over: Over) -> Any:
    class Shuffled(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            buffer, draws = [], random.Random(3)
            for row in Rows().rows:
                buffer.append(row)
                if len(buffer) == 8:
                    yield buffer.pop(draws.randrange(8))
            yield from buffer

    return train(over, batches(Shuffled()), epochs=2)


@ahead
def a_loader_with_a_thread(over: Over) -> Any:
    """Its thread appends while the body runs: this is no change by the body."""

    class Threaded:
        def __init__(self) -> None:
            self.ready = list[Tensor]()
            self.filled = threading.Event()

        def fill(self) -> None:
            self.ready.extend(PARTS)
            self.filled.set()

        def __iter__(self) -> Iterator[Tensor]:
            self.thread = threading.Thread(target=self.fill)
            self.thread.start()
            self.filled.wait()
            self.thread.join()
            while self.ready:
                yield self.ready.pop(0)

    return train(over, Threaded(), epochs=2)


@serial("The loader uses a Cursor, which belongs to the thread that made it")
def rows_of_a_database(over: Over) -> Any:
    base = sqlite3.connect(":memory:")
    base.execute("create table t (a real, b real, c real, d real)")
    base.executemany("insert into t values (?, ?, ?, ?)", Rows().rows.tolist())
    decode = lambda ctx: setattr(ctx, "x", torch.tensor([ctx.batch]))  # noqa: E731
    result = train(over, base.execute("select * from t"), decode=decode)
    base.close()
    return result


# ------------------------------------------------------------------------------ errors


def _until(over: Over, loader: Any, kind: type[Exception], **functions: Any) -> Any:
    """Two passes, each until an error; what was trained until then."""
    parts, seen = Training(), list[Any]()
    with over(loader, parts.functions(**functions)) as loop:
        for _ in range(2):
            try:
                for ctx in loop:
                    seen.append((ctx.iter_idx, ctx.loss.item()))
            except kind as error:
                seen.append(list(str(error).encode()))
            seen.append(random.random())
    return [seen, parts.state()]


@ahead
def a_row_that_cannot_be_read(over: Over) -> Any:
    """The batches before it are trained on."""

    class Broken(NoisyRows):
        def __getitem__(self, index: int) -> Tensor:
            if index == 13:
                raise OSError("row 13")
            return super().__getitem__(index)

    return _until(over, batches(Broken()), OSError)


@ahead
def a_second_batch_that_cannot_be_read(over: Over) -> Any:
    def loader() -> Iterator[Tensor]:
        yield PARTS[0]
        raise OSError("batch 1")

    return _until(over, loader(), OSError)


@ahead
def a_decode_that_fails(over: Over) -> Any:
    """Ahead of the batches before it, which are trained on."""
    shapes = [4, 4, 4, 2]

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch.reshape(4, 4)

    loader = [torch.ones(size, 4) for size in shapes]
    return _until(over, loader, RuntimeError, decode=decode)


@ahead
def a_step_that_fails(over: Over) -> Any:
    count = [0]

    def note(ctx: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise KeyError("step")

    return [_until(over, batches(NoisyRows()), KeyError, note=note), count]

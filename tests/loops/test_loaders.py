"""A loop that pulls ahead has the numbers of the plain loop, or raises an error with the reason.

Each script takes ``over``, a function from a loader and functions to an iterable of contexts: a
plain loop, or ``swpipe.overlap`` with the declarations of the script's author.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

import swpipe
from swpipe.errors import PlanError
from swpipe.loops import OverlappedLoop
from swpipe.pipeline import settle
from tests.loops.ordinary_loops import (
    Fn,
    Rows,
    Training,
    batches,
)
from tests.support.sequencer import PATIENCE_S

# Told where the body draws, too; test_draws looks at it.
pytestmark = pytest.mark.filterwarnings("ignore:the loop, a task or its body, draws")

Over = Callable[[Any, list[Any]], Any]
Script = Callable[[Over], Any]
PARTS = Rows().rows.split(4)

AHEAD: dict[str, Script] = {}
REFUSED: dict[str, tuple[Script, str]] = {}


def ahead(script: Script) -> Script:
    """Register a script whose loader and decode run ahead with equal numbers."""
    AHEAD[script.__name__.replace("_", " ")] = script
    return script


def refused(why: str) -> Callable[[Script], Script]:
    """Register a script that is refused with an error, since a declaration is wrong."""

    def add(script: Script) -> Script:
        REFUSED[script.__name__.replace("_", " ")] = script, why
        return script

    return add


def train(
    over: Over,
    loader: Any,
    *,
    epochs: int = 1,
    body: Fn = lambda ctx: None,
    every: int = 0,
    **functions: Fn,
) -> Any:
    """Train for some epochs, each of which is left after ``every`` iterations."""
    parts = Training()
    losses, seen = [], 0
    with over(loader, parts.tasks(**functions)) as loop:
        for _ in range(epochs):
            for ctx in loop:
                losses.append(ctx.loss.item())
                body(ctx)
                seen += 1
                if every and seen % every == 0:
                    break
            losses.append(random.random())
    return [losses, parts.state()]


# ------------------------------------------------------------------------------ draws


@ahead
def workers_that_shuffle_by_a_given_generator(over: Over) -> Any:
    draws = torch.Generator().manual_seed(3)
    loader = batches(num_workers=1, shuffle=True, generator=draws)
    return [train(over, loader, epochs=3, every=4), torch.rand(1, generator=draws)]


@ahead
def passes_that_are_left_at_their_last_batch(over: Over) -> Any:
    """Leave each pass at its last batch, so that the sampler does not draw at the end."""
    draws = torch.Generator().manual_seed(3)
    loader = batches(shuffle=True, generator=draws, batch_size=2)  # the last one is whole
    return [train(over, loader, epochs=3, every=11), torch.rand(1, generator=draws)]


class LateRows(Rows):
    """A dataset that draws if it is switched on."""

    draw = False

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * (random.random() if self.draw else 1.0)


@ahead
def a_loader_that_draws_from_the_second_pass_on(over: Over) -> Any:
    """Switch augmentation on between two passes of a body that draws."""
    rows = LateRows()
    parts, losses = Training(), []
    with over(batches(rows), parts.tasks()) as loop:
        for _ in range(3):
            losses += [(ctx.loss.item(), random.random()) for ctx in loop]
            rows.draw = True
    return [losses, parts.state()]


# ------------------------------------------------------------------------------ passes


class OwnIterator:
    """A loader that restarts, and returns itself as the iterator."""

    def __iter__(self) -> Iterator[Tensor]:
        self.rest = iter(PARTS)
        return self

    def __next__(self) -> Tensor:
        return next(self.rest)


@refused("is its own iterator.*whether a new pass begins anew or goes on is not known")
def an_object_that_is_its_own_iterator_and_is_left(over: Over) -> Any:
    return train(over, OwnIterator(), epochs=2, every=2)


TWICE = "tasks that ran ahead have modified batches that were dropped.*would give them again"


class InPlace:
    """A decode that changes its batch, and a task that waits until decode has done so ahead."""

    def __init__(self, decode: Fn) -> None:
        self._decode, self._ahead, self._thread = decode, threading.Event(), 0
        self.functions: dict[str, Fn] = {
            "decode": partial(self.decode),
            "note": partial(self.note),
        }

    def decode(self, ctx: Any) -> None:
        self._decode(ctx)
        self._thread = threading.get_ident()
        if ctx.iter_idx == 2:
            self._ahead.set()

    def note(self, ctx: Any) -> None:
        if ctx.iter_idx == 1 and threading.get_ident() != self._thread:
            assert self._ahead.wait(60)


def left(over: Over, loader: Any, decode: Fn) -> Any:
    """Train in passes that are left after two iterations."""
    return train(over, loader, epochs=3, every=2, **InPlace(decode).functions)


def double(ctx: Any) -> None:
    ctx.x = ctx.batch.mul_(2)


def double_array(ctx: Any) -> None:
    ctx.batch *= 2
    ctx.x = torch.tensor(ctx.batch)


def double_item(ctx: Any) -> None:
    ctx.x = ctx.batch["x"] = ctx.batch["x"] * 2


class Holder:
    """A loader that keeps its batches."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = [*parts]

    def __iter__(self) -> Iterator[Any]:
        yield from self.parts


@refused(TWICE)
def an_iterator_whose_batches_were_modified(over: Over) -> Any:
    return left(over, map(torch.clone, PARTS), double)


@refused(TWICE)
def a_holder_whose_arrays_were_modified(over: Over) -> Any:
    return left(over, Holder(part.numpy().copy() for part in PARTS), double_array)


@refused(TWICE)
def a_list_of_dicts_that_were_modified(over: Over) -> Any:
    return left(over, [{"x": part} for part in PARTS], double_item)


# ------------------------------------------------------------------- what the loop changes


@refused("the loop has changed the list")
def the_body_replaces_a_batch(over: Over) -> Any:
    parts = list(PARTS)
    return train(over, parts, body=lambda ctx: parts.__setitem__(-3, parts[0]))


@refused("the loop has changed the list")
def the_body_appends_to_the_list(over: Over) -> Any:
    """Append to the list in the body, where a plain loop would continue with the new batch."""
    parts = list(PARTS)
    return train(
        over, parts, body=lambda ctx: parts.append(parts[0]) if ctx.iter_idx == 5 else None
    )


@refused("the loop has changed the loader's sampler or dataset")
def the_body_changes_the_size_of_batches(over: Over) -> Any:
    loader = batches(num_workers=1)
    return train(over, loader, body=lambda ctx: setattr(loader.batch_sampler, "batch_size", 2))


class Replay:
    """A replay buffer to which the loop adds; its length takes long, as on a busy machine."""

    def __init__(self) -> None:
        self.rows = list(Rows().rows)

    def __len__(self) -> int:
        time.sleep(0.001)
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(12):
            yield torch.stack([self.rows[number % len(self)], self.rows[-1]])


@refused("the loop has changed the length of the loader or of its dataset")
def a_replay_buffer_that_grows(over: Over) -> Any:
    buffer = Replay()
    return train(over, buffer, body=lambda ctx: buffer.rows.append(torch.ones(4)))


@refused("the batch of iteration [123] was modified in place.*after 'decode' had run on it ahead")
def a_batch_that_the_list_holds_twice(over: Over) -> Any:
    return train(over, [torch.ones(2, 4)] * 4, body=lambda ctx: ctx.batch.add_(1))


@refused("memory of an earlier one|was modified in place|not any more what the loader made")
def one_buffer_for_all_batches(over: Over) -> Any:
    def loader() -> Iterator[Tensor]:
        buffer = torch.empty(4, 4)
        for part in PARTS[:-1]:
            yield buffer.copy_(part)

    return train(over, loader())


@refused("memory of an earlier one|was modified in place|not any more what the loader made")
def one_tensor_over_an_array(over: Over) -> Any:
    """Train on a loader that yields one tensor; its version counts no writes to its array."""
    buffer = np.empty((4, 4), np.float32)
    tensor = torch.from_numpy(buffer)

    def loader() -> Iterator[Tensor]:
        for part in PARTS[:-1]:
            buffer[:] = part
            yield tensor

    return train(over, loader())


@ahead
def an_array_that_all_batches_have(over: Over) -> Any:
    """Share an array that nobody writes among all batches."""
    mask = np.ones(4, np.float32)
    decode = lambda ctx: setattr(ctx, "x", ctx.batch[0] * torch.from_numpy(ctx.batch[1]))  # noqa: E731
    return train(over, ((part, mask) for part in PARTS), decode=decode)


# ------------------------------------------------------------------------------ errors


def _until(over: Over, loader: Any, kind: type[BaseException], **functions: Any) -> Any:
    """Run two passes, each until an error; return what was trained before."""
    parts, seen = Training(), list[Any]()
    with over(loader, parts.tasks(**functions)) as loop:
        for _ in range(2):
            try:
                for ctx in loop:
                    seen.append((ctx.iter_idx, ctx.loss.item()))
            except kind as error:
                seen.append(list(str(error).encode()))
            seen.append(random.random())
    return [seen, parts.state()]


@ahead
def a_loader_that_is_cancelled(over: Over) -> Any:
    """Raise an error that is no ``Exception`` in the loader."""

    def loader() -> Iterator[Tensor]:
        yield from PARTS[:4]
        raise asyncio.CancelledError("loader")

    return _until(over, loader(), asyncio.CancelledError)


@ahead
def a_decode_that_exits(over: Over) -> Any:
    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch
        if ctx.iter_idx == 3:
            raise SystemExit("decode")

    return _until(over, batches(), SystemExit, decode=decode)


# ------------------------------------------------------------------------------ the tests


class Plain:
    """A plain loop, as an iterable of contexts."""

    def __init__(self, loader: Any, functions: list[Any]) -> None:
        self.loader, self.functions, self.count = loader, functions, 0

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *failure: object) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            ctx = SimpleNamespace(batch=batch, iter_idx=self.count)
            self.count += 1
            for function in self.functions:
                function(ctx)
            yield ctx


def overlapped(loader: Any, functions: list[Any]) -> OverlappedLoop[Any]:
    """Return an overlapped loop that pulls ahead, by declaration if necessary."""
    known = isinstance(loader, list) or getattr(loader, "num_workers", 0)
    said = None if known else True
    # Pure tasks are not watched: what is refused here is what the loop sees itself.
    draws = True if said and not isinstance(loader, DataLoader) else None
    loop = swpipe.overlap(
        loader, functions, pull_ahead=said, draws=draws, device="cpu", check_effects=False
    )
    assert loop.overlap.loader_ahead
    assert loop.overlap.ahead == ("decode",)
    return loop


class Settled:
    """A loop whose body runs when everything that may be pulled has been pulled."""

    def __init__(self, loader: Any, functions: list[Any]) -> None:
        self._loop = overlapped(loader, functions)

    def __enter__(self) -> Settled:
        return self

    def __exit__(self, *failure: object) -> None:
        self._loop.close()

    def __iter__(self) -> Iterator[Any]:
        for ctx in self._loop:
            settle(self._loop.pipe)
            yield ctx


def numbers(script: Script, over: Over) -> Any:
    """Return the results of the script, and the next draws of the generators."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    found = script(over)
    return [found, torch.rand(1), random.random(), float(np.random.rand())]


def same(found: Any, expected: Any) -> None:
    """Check that every number is the same."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", AHEAD)
def test_a_loader_runs_ahead_and_the_numbers_are_the_same(name: str) -> None:
    """The loader may draw anything, and the loop may be left anywhere."""
    same(numbers(AHEAD[name], overlapped), numbers(AHEAD[name], Plain))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_as_it_was_said_is_an_error(name: str) -> None:
    """The error says what it is, and what to do.

    If the loop reached first what it has changed, there is no error, and the numbers are the same.
    """
    script, why = REFUSED[name]
    with pytest.raises((RuntimeError, PlanError), match=f"(?s){why}"):
        numbers(script, Settled)
    try:
        found = numbers(script, overlapped)
    except (RuntimeError, PlanError) as error:
        assert re.search(f"(?s){why}", str(error))  # noqa: PT017
    else:
        same(found, numbers(script, Plain))


def test_a_length_that_costs_much_is_not_asked_for_with_each_batch() -> None:
    """It would delay the pulls."""
    asked = 0

    class Slow:
        def __len__(self) -> int:
            nonlocal asked
            asked += 1
            end_s = time.thread_time() + 0.003
            while time.thread_time() < end_s:
                pass
            return 12

        def __iter__(self) -> Iterator[Tensor]:
            return iter(PARTS[:1] * 12)

    assert sum(1 for _ in swpipe.ahead(Slow(), device="cpu")) == 12
    assert asked < 6


def test_a_loop_that_is_left_and_drawn_beside_is_told() -> None:
    """The loader's draws ahead cannot be undone, since the body has drawn after them."""
    draws = torch.Generator().manual_seed(3)
    sampler = RandomSampler(Rows(), replacement=True, num_samples=200, generator=draws)
    rows = batches(sampler=sampler, num_workers=1)
    loop = swpipe.overlap(rows, Training().tasks(), device="cpu")
    contexts = iter(loop)
    for _ in range(14):  # so many are drawn at a time, and 4 pulls are in turn
        next(contexts)
    settle(loop.pipe)
    torch.rand(1, generator=draws)
    with pytest.warns(RuntimeWarning, match="has drawn ahead from the generator of its RandomS"):
        contexts.close()  # type: ignore[attr-defined]
    loop.close()


def test_an_iterator_is_pulled_ahead_by_one_loop() -> None:
    """Another one would miss batches, unless the first was closed, or is gone."""
    data = iter(range(20))
    tasks = [swpipe.task(pure=True, name="decode")(lambda ctx: None)]
    first = swpipe.overlap(data, tasks, pull_ahead=True, device="cpu")
    for _ in first:
        break
    with pytest.raises(ValueError, match="another loop pulls ahead from this iterator"):
        swpipe.overlap(data, tasks, pull_ahead=True, device="cpu")
    assert [ctx.batch for ctx in first] == list(range(1, 20))
    first.close()
    second = swpipe.overlap(data, tasks, pull_ahead=True, device="cpu")
    del second
    swpipe.overlap(data, tasks, pull_ahead=True, device="cpu").close()


class Closing:
    """A loader that counts, by a semaphore, the passes whose ``finally`` has run."""

    def __init__(self) -> None:
        self.over = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            self.over.release()


@pytest.mark.parametrize("pull_ahead", [True, False])
def test_the_finally_of_a_generator_runs_when_the_loop_is_left(pull_ahead: bool) -> None:
    """A plain loop runs it when it is left; for a given generator it runs when the loop is gone.

    If the loop is left while a batch is pulled ahead, it runs at the end of that pull.
    """
    loader = Closing()
    with swpipe.overlap(loader, [print_nothing], pull_ahead=pull_ahead, device="cpu") as loop:
        for ctx in loop:
            if ctx.iter_idx == 2:
                break
        assert loader.over.acquire(timeout=PATIENCE_S)
        assert len(list(loop)) == 9
        assert loader.over.acquire(timeout=PATIENCE_S)
    given = Closing()
    with swpipe.overlap(iter(given), [print_nothing], pull_ahead=pull_ahead, device="cpu") as loop:
        for _ in loop:
            break
        assert not given.over.acquire(blocking=False)
        assert next(iter(loop)).batch == 1
    del loop
    gc.collect()  # a pass refers to itself
    assert given.over.acquire(timeout=PATIENCE_S)


def print_nothing(ctx: Any) -> None:
    """Do nothing."""


def test_a_loop_that_is_left_and_forgotten_keeps_no_thread() -> None:
    """This holds over an iterator, too, with which the caller continues."""
    endless = (torch.ones(2, 4) for _ in iter(int, 1))
    loop = swpipe.overlap(endless, Training().tasks(), pull_ahead=True, device="cpu")
    for ctx in loop:
        if ctx.iter_idx == 2:
            break
    gone = weakref.ref(loop)
    del loop
    assert gone() is None
    assert next(endless).shape == (2, 4)


def test_batches_that_were_modified_ahead_are_not_given_to_a_loop_that_is_set_back() -> None:
    """They would be modified twice; it is refused before anything changes."""
    functions = Training().tasks(**InPlace(double).functions)
    with swpipe.overlap([*map(torch.clone, PARTS)], functions, device="cpu") as loop:
        for ctx in loop:
            state = loop.state_dict()
            if ctx.iter_idx == 1:
                break
        with pytest.raises(RuntimeError, match=TWICE):
            loop.load_state_dict(state)

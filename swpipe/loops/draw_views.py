"""What a loader that is pulled ahead draws from torch's default generator on the host.

    plain loop          pull 1    body 1    pull 2 draws    body 2    pull 3 draws
    both draw           pull 1    body 1 ..(pull 2 waits).. draws     body 2 ..(3 waits).. draws
    only the loader     pull 1    body 1                              body 2
                                  pull 2 draws from a view            pull 3, from the view
                                            (the generator is set)              (is set)

A pull that is in turn draws from the generator itself: all earlier batches have been handed out,
and the loop waits. A pull that is ahead waits, at its first draw, until it is in turn. When the
loader has drawn in turn 4 times, and nobody else between, pulls that are ahead draw from a *view*:
a generator of their own, in the state that the last draw left. Before the loop begins with such a
batch, the generator is set to the state that its pull left the view in. A pull that waits when the
loop is left draws from a view, too, if its batch is kept for the next pass.

Guarantees
    - What the loader draws is what it would draw in a plain loop, and so is the state that the
      loop finds, whatever the timing; or else the loop gets an error, before it gets the first
      batch that was drawn otherwise.

Assumptions
    - The loader draws by torch's operators, on the thread that pulls. What it seeds by
      ``torch.manual_seed``, it seeds before its first batch, or in pulls that ``LoaderDraws``
      measures.
    - On a device it draws in turn: it always waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe._engine.waiting import Cancelled
from swpipe.device import on_cpu
from swpipe.loops.loader_draws import KnownDraws, both_draw
from swpipe.loops.pass_generators import States


class Turns(Protocol):
    """What is asked of the pipeline."""

    @property
    def is_in_turn(self) -> bool:
        """Whether the caller has asked for the batch that is pulled."""

    def await_turn(self) -> None:
        """Wait until it has."""

    def settle(self) -> None:
        """Wait until no batch is being pulled."""


class DrawViews(TorchDispatchMode):
    """Gives each pull what it draws from; operators on its thread run within this mode.

    Attributes:
        known: What is known of the loader.

    Args:
        turns: Of the pipeline.
        known: What is known of the loader.
        kept: Whether what is being pulled when the loop is left is used later.
    """

    def __init__(self, turns: Turns, known: KnownDraws, *, kept: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self._turns, self._kept = turns, kept
        self._generator = torch.default_generator
        self._view = torch.Generator()
        self._lock = threading.Lock()  # of the state, and what it was set to
        self.begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would load the compiler; nothing here is compiled

    def begin(self) -> None:
        """A new pass begins."""
        self._after: Tensor | None = None  # the last pull that drew
        self._set: Tensor | None = None  # the state in which the loop should have left it
        self._left: deque[tuple[int, Tensor]] = deque()  # by pulls that drew from the view
        self._draws = self._draws_ahead = False  # in this pull
        self._found: Tensor | None = None  # the state in which this pull drew first

    def pulled(self, number: int) -> States:
        """A pull has ended, by its number in the pass from 1; the state in which it drew first."""
        found = States() if self._found is None else {"torch cpu": self._found}
        if self._draws_ahead:
            self._after = self._view.get_state()
            self._left.append((number, self._after))
        elif self._draws:
            self._after = self._set = self._generator.get_state()
        self._draws = self._draws_ahead = False
        self._found = None
        return found

    def begin_batch(self, number: int) -> None:
        """The loop comes to the batch of a pull that has ended: set the generator for it."""
        while self._left and self._left[0][0] <= number:
            _, state = self._left.popleft()
            self._check_set()
            with self._lock:
                self._generator.set_state(state)
                self._set = state

    def _is_set(self) -> bool:
        """Whether nobody else has drawn since the generator was set."""
        with self._lock:
            return self._set is None or torch.equal(self._generator.get_state(), self._set)

    def _check_set(self) -> None:
        if not self._is_set():
            self._left.clear()
            raise both_draw(["torch cpu"])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            other = _with_generator(func) if _is_on_host(args, kwargs) else None
            if (view := self._drawn_from(may_be_ahead=other is not None)) is not None:
                if other is not None:
                    return other(*args, **{**kwargs, "generator": view})
                with self._view_in_place():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _drawn_from(self, *, may_be_ahead: bool) -> torch.Generator | None:
        """The view from which an operator is to draw; None for the generator itself."""
        if self._draws_ahead:
            if may_be_ahead or self._is_out_of_turn():
                return self._view
            self._check_set()
            self._generator.set_state(self._view.get_state())
            self._draws_ahead = False
        if self._draws:
            return None
        self._draws = True
        if not self._turns.is_in_turn:
            if may_be_ahead and self.known.torch_ahead and self._after is not None:
                if self._is_set():
                    return self._view_from(self._after)
                self.known.torch_shared = True
            self.known.waits += 1
            if self._is_out_of_turn():
                return self._view_from(self._after if self._left else None)
        self._found = self._generator.get_state()
        if self._after is not None:
            if torch.equal(self._found, self._after):
                self.known.quiet += 1
            else:
                self.known.torch_shared = True
        return None

    def _view_from(self, state: Tensor | None) -> torch.Generator:
        """The view, in a state; None for the generator's own, while the loop waits."""
        if state is None:
            state = self._set = self._generator.get_state()
        self._draws_ahead = True
        self._view.set_state(state)
        self._found = state
        return self._view

    @contextmanager
    def _view_in_place(self) -> Iterator[None]:
        """The generator is in the view's state within the block, while the loop waits."""
        state = self._generator.get_state()
        self._generator.set_state(self._view.get_state())
        try:
            yield
        finally:
            self._view.set_state(self._generator.get_state())
            self._generator.set_state(state)

    def _is_out_of_turn(self) -> bool:
        """Wait for the turn; whether the loop, which waits, lets the pull end before it."""
        try:
            self._turns.await_turn()
        except Cancelled:
            if not self._kept:
                raise
            return True  # an iterator would not survive the exception
        return not self._turns.is_in_turn


def _is_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is None:
        found = [one.device for one in args if isinstance(one, Tensor)]
        device = found[0] if found else torch.get_default_device()
    return on_cpu(torch.device(device))


@cache
def _with_generator(func: Any) -> Any:
    """The operator, or its overload, that takes a generator; None if there is none."""
    if any(one.name == "generator" for one in func._schema.arguments):
        return func
    name = func._schema.overload_name
    return getattr(func.overloadpacket, f"{name}_generator" if name else "generator", None)

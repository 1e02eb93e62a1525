"""Balances the prefetch queues of tables whose look-up takes the oldest prefetch (dynamicemb).

``prefetch`` of such a table pins rows and appends a state to a queue. Its ``forward`` takes the
oldest state, whatever the ids. Its backward unpins the rows. If one batch is prefetched and not
looked up, every later batch gets the rows of another batch, and rows that are never unpinned fill
the cache. Therefore every batch has its own states here::

    EmbPrefetch     table's queue ──> ahead       one entry for each batch, in order
    EmbForward      ahead ──> table's queue ──> behind, when it is looked up
    EmbBackward     behind ──> released, as far as its backward has not run

    EmbPrefetch replayed    ahead gets an empty entry: the look-up prefetches by itself
    EmbForward replayed     the batch's states are released
    EmbBackward replayed    as when it runs
    batches dropped         everything is released

A look-up that prefetches by itself passes on the counts of its keys, which the exchange of ids has
as weights. TorchRec's ``prefetch`` does not, so each key counts once: eviction by frequency, or
admission, would keep other rows. Here every prefetch of a batch gets its counts.

Releasing a state has the effect that its look-up and its backward would have had: its keys are no
longer counted as outstanding, and its rows are unpinned. dynamicemb is not imported. A module
counts as such a table if it has these attributes:

    _prefetch_states              deque of states, the oldest first
    prefetch                      with frequency_counters, where its keys have been counted
    _prefetch_outstanding_keys    tensor: keys that were prefetched and not looked up
    cache, tables                 with decrement_counter(slots, table_ids); cache may be None
    state.num_prefetched_keys, state.outstanding_keys_ref, state.update_slot_indices,
    state.unique_table_ids        what is counted off, and unpinned; None where nothing is
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from swpipe.core.task import DeclaredIO
from swpipe.tasks.torchrec.embedding_tables.table_state import table_parts
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError


class PrefetchedBatches:
    """The prefetched states of each batch in flight."""

    def __init__(self, tables: Iterable[_Table]) -> None:
        self._tables = tuple(tables)
        # Batches that are prefetched and not looked up, oldest first, and batches that are looked
        # up whose backward has not run.
        self._ahead: deque[list[_State]] = deque()
        self._behind: deque[list[_State]] = deque()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> Self | None:
        """Return the queues of sharded modules, given by name; None if no table has a queue.

        Raises:
            RewriteError: A table of dynamicemb does not have the queue.
        """
        tables = tuple(_find(modules))
        return cls(tables) if tables else None

    def io(self, parts: Iterable[str]) -> list[DeclaredIO]:
        """Return the declarations of the task with these methods of ``SparseDistTasks``.

        A declaration says what becomes of a batch whose task is replayed, and of dropped batches.
        State that is captured with no batch in flight, before a trial, has nothing to put back.
        """
        replay = {
            "prefetch": (self._not_prefetched, self.drop),
            "embedding_forward": (self._not_looked_up, None),
            "embedding_backward": (self._not_finished, None),
        }
        return [
            DeclaredIO(lambda: bool(self._ahead or self._behind), replayed, reset=reset)
            for replayed, reset in (replay[part] for part in parts if part in replay)
        ]

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """Provide a block in which the tables prefetch one batch."""
        for table in self._tables:
            table.check_empty()
        # Remembered, since `drop` replaces the deque from another thread while this block runs: the
        # states then belong to a dropped batch, and are released.
        ahead = self._ahead
        try:
            yield
        finally:
            states = [state for table in self._tables for state in table.take()]
            if ahead is not self._ahead:
                _release(states)
            else:
                ahead.append(states)

    @contextmanager
    def counting(self, ids: Any) -> Iterator[None]:
        """Provide a block in which prefetches of these ids get the counts of their keys."""
        counted = [features for features in ids if features.weights_or_none() is not None]
        with ExitStack() as stack:
            for table in self._tables if counted else ():
                stack.enter_context(table.counting(counted))
            yield

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """Provide a block in which the oldest of the prefetched batches is looked up."""
        states = self._ahead.popleft()
        behind = self._behind
        behind.append(states)
        try:
            with ExitStack() as stack:
                for table in self._tables:
                    stack.enter_context(table.looking_up(states))
                yield
        finally:
            # Dropped meanwhile by another thread, as in `prefetching`.
            if behind is not self._behind:
                _release(states)

    def finish_backward(self) -> None:
        """Release the oldest looked-up batch, whose backward has run or will not run."""
        _release(self._behind.popleft())

    def drop(self) -> None:
        """Drop all batches and release their states."""
        # New deques rather than cleared ones, so that running blocks notice the drop.
        dropped = [*self._ahead, *self._behind]
        self._ahead = deque()
        self._behind = deque()
        for states in dropped:
            _release(states)
        for table in self._tables:
            # A prefetch that failed has counted its keys, and left no state.
            table.module._prefetch_outstanding_keys.zero_()

    def _not_prefetched(self, ran: bool) -> None:
        if ran:
            self._ahead.append([])

    def _not_looked_up(self, ran: bool) -> None:
        if ran:
            _release(self._ahead.popleft())
            self._behind.append([])

    def _not_finished(self, _ran: bool) -> None:
        # In a serial run, the task has emptied the deque itself.
        if self._behind:
            self.finish_backward()


@dataclass(frozen=True)
class _Table:
    """One table, or a group of tables, with its queue."""

    name: str
    module: Any

    def check_empty(self) -> None:
        if states := len(self.module._prefetch_states):
            raise RuntimeError(
                f"module {self.name!r} ({type(self.module).__name__}) holds {states} prefetched "
                "batches of another pipeline, and would look them up in place of this one's: let "
                "the other one finish first, or clear the queue"
            )

    @contextmanager
    def counting(self, ids: list[Any]) -> Iterator[None]:
        """Provide a block in which ``prefetch`` gets the weights of the given indices as counts."""
        prefetch = self.module.prefetch

        def counted(indices: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> None:
            for features in ids:
                values = features.values()
                weights = features.weights()
                # The indices are a slice of the values of one jagged tensor, so the same slice of
                # its weights has their counts.
                first = indices.storage_offset() - values.storage_offset()
                if indices.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
                    kwargs["frequency_counters"] = weights[first : first + len(indices)]
            prefetch(indices, offsets, *args, **kwargs)

        self.module.prefetch = counted
        try:
            yield
        finally:
            del self.module.prefetch

    def take(self) -> list[_State]:
        """Return the states in the queue, and empty it."""
        queue = self.module._prefetch_states
        states = [_State(self, state) for state in queue]
        queue.clear()
        return states

    @contextmanager
    def looking_up(self, states: list[_State]) -> Iterator[None]:
        """Provide a block in which the queue has one batch's states; new states are added."""
        self.check_empty()
        # States are compared by identity, since they hold tensors.
        known = {id(entry.state): entry for entry in states if entry.table is self}
        own = self.module._prefetch_states
        queue = _Queue(entry.state for entry in known.values())

        def take(state: Any) -> _State:
            if id(state) not in known:
                known[id(state)] = _State(self, state)
                states.append(known[id(state)])
            return known[id(state)]

        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if queue.taken:
                take(queue.taken[-1]).looked_up(output)

        # In the hook, since the table takes the state inside its forward.
        hook = self.module.register_forward_hook(after_forward)
        self.module._prefetch_states = queue
        try:
            yield
        finally:
            self.module._prefetch_states = own
            hook.remove()
            # States that the look-up made itself, and states that it left, belong to this batch.
            for state in (*queue.taken, *queue):
                take(state)


class _State:
    """The state that one prefetch left, and its effects that are still to be undone."""

    def __init__(self, table: _Table, state: Any) -> None:
        self.table = table
        self.state = state
        self._counted = state.outstanding_keys_ref is not None
        self._pinned = state.update_slot_indices is not None

    def looked_up(self, output: Any) -> None:
        """Note that the look-up has counted its keys off, and that its backward unpins its rows."""
        self._counted = False
        # Without gradients no backward runs, and the rows stay pinned until release().
        if output.grad_fn is not None:
            output.grad_fn.register_hook(self._backward_ran)

    def release(self) -> None:
        """Undo the remaining effects."""
        state = self.state
        module = self.table.module
        if self._counted:
            state.outstanding_keys_ref -= state.num_prefetched_keys
        if self._pinned:
            slots = module.tables if module.cache is None else module.cache
            slots.decrement_counter(state.update_slot_indices, state.unique_table_ids)
        # Released once only: a second decrement would unpin rows of other batches.
        self._counted = False
        self._pinned = False

    def _backward_ran(self, *_: object) -> None:
        self._pinned = False


class _Queue(deque[Any]):
    """A queue that remembers the states that were taken from it."""

    def __init__(self, states: Iterable[Any]) -> None:
        super().__init__(states)
        self.taken: list[Any] = []

    def popleft(self) -> Any:
        """Take and return the oldest state."""
        self.taken.append(super().popleft())
        return self.taken[-1]


def _release(states: Iterable[_State]) -> None:
    for state in states:
        state.release()


def _find(modules: Mapping[str, nn.Module]) -> Iterator[_Table]:
    for name, sharded in modules.items():
        for module in table_parts([sharded]):
            if isinstance(getattr(module, "_prefetch_states", None), deque):
                yield _Table(name, module)
                continue
            package = type(module).__module__.partition(".")[0]
            if package == "dynamicemb" and hasattr(module, "prefetch"):
                raise RewriteError(
                    f"module {name!r} has a {type(module).__name__} of dynamicemb without the "
                    "queue of prefetched batches, _prefetch_states, which has to be balanced: "
                    "install the version of dynamicemb that the guide names"
                )

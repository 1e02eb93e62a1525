"""Balances tables whose look-up takes what the oldest prefetch left, as those of dynamicemb do.

Their ``prefetch`` pins rows and appends a state to a queue; their ``forward`` takes the oldest
state, whatever ids it is called with; their backward unpins the rows. So one batch that is
prefetched and not looked up gives every later batch the rows of another one, and rows that are not
unpinned fill the cache. Here every batch has its own states::

    EmbPrefetch     table's queue ──> ahead       one entry for each batch, in order
    EmbForward      ahead ──> table's queue ──> behind, when it is looked up
    EmbBackward     behind ──> released, as far as its backward has not run

    EmbPrefetch replayed    ahead gets an empty entry: the look-up prefetches by itself
    EmbForward replayed     the batch's states are released
    EmbBackward replayed    as when it runs
    batches dropped         everything is released

A look-up that prefetches by itself hands the counts of its keys on, which the exchange of ids has
as weights. TorchRec's ``prefetch`` does not, and then each key counts once: with eviction by
frequency, or admission, other rows would be kept. Here every prefetch of a batch has its counts.

A state is released by what its look-up and its backward would have done: its keys are counted off,
and its rows are unpinned. No table is imported: what has these attributes is one.

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
from typing import Any, Self

from torch import Tensor, nn

from swpipe._values.stateful import modules_in
from swpipe.core.task import DeclaredIO
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError


class PrefetchedBatches:
    """What was prefetched for each batch in flight."""

    def __init__(self, tables: Iterable[_Table]) -> None:
        self._tables = tuple(tables)
        self._ahead: deque[list[_State]] = deque()
        self._behind: deque[list[_State]] = deque()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> Self | None:
        """For sharded modules, by name; None where no table has a queue.

        Raises:
            RewriteError: Tables of dynamicemb, but without the queue.
        """
        tables = tuple(_find(modules))
        return cls(tables) if tables else None

    def io(self, parts: Iterable[Any]) -> list[DeclaredIO]:
        """What the task with these methods of ``SparseDistTasks`` declares.

        It is what becomes of a batch where the task is replayed, and where batches are dropped.
        What is captured with no batch in flight, before a trial, has nothing to put back.
        """
        replay = {
            "prefetch": (self._not_prefetched, self.drop),
            "embedding_forward": (self._not_looked_up, None),
            "embedding_backward": (self._not_finished, None),
        }
        found = (replay[part.__name__] for part in parts if part.__name__ in replay)
        return [
            DeclaredIO(lambda: bool(self._ahead or self._behind), replayed, reset=reset)
            for replayed, reset in found
        ]

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """A block in which the tables prefetch one batch."""
        for table in self._tables:
            table.check_empty()
        ahead = self._ahead
        try:
            yield
        finally:
            states = [state for table in self._tables for state in table.take()]
            if ahead is not self._ahead:  # dropped meanwhile, from another thread
                _release(states)
            else:
                ahead.append(states)

    @contextmanager
    def counting(self, ids: Any) -> Iterator[None]:
        """A block in which prefetches of these jagged tensors get the counts of their keys."""
        counted = [one for one in ids if one.weights_or_none() is not None]
        with ExitStack() as stack:
            for table in self._tables if counted else ():
                stack.enter_context(table.counting(counted))
            yield

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """A block in which the oldest of the prefetched batches is looked up."""
        states = self._ahead.popleft()
        behind = self._behind
        behind.append(states)
        try:
            with ExitStack() as stack:
                for table in self._tables:
                    stack.enter_context(table.looking_up(states))
                yield
        finally:
            if behind is not self._behind:
                _release(states)

    def finish_backward(self) -> None:
        """The backward of the oldest batch that was looked up has run, or will not."""
        _release(self._behind.popleft())

    def drop(self) -> None:
        """Drop all batches."""
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
        if self._behind:  # it has emptied it itself, serially
            self.finish_backward()


class _Table:
    """One table, or a group of them, with its queue."""

    def __init__(self, name: str, module: Any) -> None:
        self.module = module
        self._name = name

    def check_empty(self) -> None:
        if states := len(self.module._prefetch_states):
            raise RuntimeError(
                f"module {self._name!r} ({type(self.module).__name__}) holds {states} prefetched "
                "batches of another pipeline, and would look them up in place of this one's: let "
                "the other one finish first, or clear the queue"
            )

    @contextmanager
    def counting(self, ids: list[Any]) -> Iterator[None]:
        """A block in which its ``prefetch`` gets the weights that lie beside the given indices."""
        prefetch = self.module.prefetch

        def counted(indices: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> None:
            for one in ids:
                values = one.values()
                weights = one.weights()
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
        """The states in the queue, which is empty afterwards."""
        queue = self.module._prefetch_states
        states = [_State(self, state) for state in queue]
        queue.clear()
        return states

    @contextmanager
    def looking_up(self, states: list[_State]) -> Iterator[None]:
        """A block in which it has the states of one batch alone; those that it makes are added."""
        self.check_empty()
        known = {id(one.state): one for one in states if one.table is self}
        own = self.module._prefetch_states
        queue = _Queue(one.state for one in known.values())

        def take(state: Any) -> _State:
            if id(state) not in known:
                known[id(state)] = _State(self, state)
                states.append(known[id(state)])
            return known[id(state)]

        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if queue.taken:
                take(queue.taken[-1]).looked_up(output)

        hook = self.module.register_forward_hook(after_forward)
        self.module._prefetch_states = queue
        try:
            yield
        finally:
            self.module._prefetch_states = own
            hook.remove()
            for state in (*queue.taken, *queue):
                take(state)


class _State:
    """What one prefetch left, and what of it is still to be undone."""

    def __init__(self, table: _Table, state: Any) -> None:
        self.table = table
        self.state = state
        self._counted = state.outstanding_keys_ref is not None
        self._pinned = state.update_slot_indices is not None

    def looked_up(self, output: Any) -> None:
        """Its look-up has returned, and has counted its keys off; its backward unpins its rows."""
        self._counted = False
        if output.grad_fn is not None:
            output.grad_fn.register_hook(self._backward_ran)

    def release(self) -> None:
        """Undo what is left."""
        state = self.state
        module = self.table.module
        if self._counted:
            state.outstanding_keys_ref -= state.num_prefetched_keys
        if self._pinned:
            slots = module.tables if module.cache is None else module.cache
            slots.decrement_counter(state.update_slot_indices, state.unique_table_ids)
        self._counted = self._pinned = False

    def _backward_ran(self, *_: object) -> None:
        self._pinned = False


class _Queue(deque[Any]):
    """A queue that remembers what was taken."""

    def __init__(self, states: Iterable[Any]) -> None:
        super().__init__(states)
        self.taken: list[Any] = []

    def popleft(self) -> Any:
        """Take the oldest."""
        self.taken.append(super().popleft())
        return self.taken[-1]


def _release(states: Iterable[_State]) -> None:
    for state in states:
        state.release()


def _find(modules: Mapping[str, nn.Module]) -> Iterator[_Table]:
    for name, sharded in modules.items():
        for module in modules_in(sharded):
            if isinstance(getattr(module, "_prefetch_states", None), deque):
                yield _Table(name, module)
            elif _of_dynamicemb(module) and callable(getattr(module, "prefetch", None)):
                raise RewriteError(
                    f"module {name!r} has a {type(module).__name__} of dynamicemb without the "
                    "queue of prefetched batches, _prefetch_states, which has to be balanced: "
                    "install the version of dynamicemb that the guide names"
                )


def _of_dynamicemb(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "dynamicemb"

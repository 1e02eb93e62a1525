"""The parts of a step: the states that each uses outside of the batch's context.

A part is a method of ``SparseDistTasks``. A task calls one or several, and declares the states of
all of them. A shortcut restores gradients; the other states keep the values of the last run. In
this module, ``tasks`` is always a ``SparseDistTasks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from swpipe.core.task import DeclaredIO, Mode, Others
from swpipe.tasks.torchrec.embedding_tables.table_state import table_parts

States: TypeAlias = Mapping[str, Mode]
"""State to its mode of use."""

OTHERS: Mapping[str, Others] = {
    "tables": "r",
    **dict.fromkeys(
        (
            "shuffler", "shuffled rows", "postproc", "exchange of sizes", "exchange of ids",
            "current batch", "pinned rows", "table cache", "loss",
        ),
        "",
    ),
}  # fmt: skip
"""How the loop's body may touch a state, where it is restricted.

A model that the body evaluates reads the tables' values whatever their cache holds, and exchanges
its own batch. Changing tables or postprocs while batches are in flight is refused.
"""


DRAWS = frozenset({"postprocess_input", "embedding_forward", "dense_forward"})
"""The parts that draw random numbers if the model does."""


def undeclared_parts(tasks: Any) -> set[str]:
    """Return the parts that call a function of the user, which may touch anything."""
    given = {"postprocess_loss": tasks.step.on_losses, "watch": tasks.functions["watch"]}
    return {part for part, function in given.items() if function is not None}


def idle_parts(tasks: Any) -> set[str]:
    """Return the parts that do nothing under the options of a step.

    They are not called, which saves host time in each step.
    """
    options = tasks.options
    pins = tasks.prefetched is not None
    split = options.forward == "split"
    works = {
        "start_shuffle": options.shuffler is not None,
        "finish_shuffle": options.shuffler is not None,
        "count_tokens": tasks.step.per_token is not None,
        "prefetch": pins or options.memory or options.forward not in ("own", "pipelined"),
        "dense_forward": tasks.rewrite.looks_up_ahead,
        "embedding_backward": split or pins or tasks.replicates,
        "finalize_gradients": split or tasks.step.finalize or tasks.gradients.megatrons,
        "watch": tasks.functions["watch"] is not None,
    }
    return {part for part, needed in works.items() if not needed}


def states_of_parts(tasks: Any) -> dict[str, States]:
    """Return the states that each part of a step uses under its options, by name of the method."""
    kind = tasks.options.forward
    split = tasks.rewrite.looks_up_ahead
    shuffles = tasks.options.shuffler is not None
    late = bool(tasks.rewrite.late) or kind == "ahead"
    hands_over = bool(tasks.fused) and tasks.options.zero_grad is not None
    dense: States = {"dense": "r", "buffers": "rw"}
    tables: States = {"tables": "rw", "optimizer": "r"}
    looked_up: States = {"tables": "r", "table cache": "rw"}
    if tasks.fused:
        looked_up = {**looked_up, "optimizer": "r"}
    # The backward uses the gradients and the states that the forward has used.
    backward: States = {"gradients": "rw", "optimizer": "r", "dense": "r", "buffers": "rw"}
    # The replaced forwards use the context of one batch; each task that runs them sets it.
    forward: States = {"current batch": "rw"}
    # The rows that each batch has pinned in the tables' cache; a queue keeps the batches' order.
    embedding_backward: States = {"pinned rows": "rw"}
    if split or tasks.replicates:
        embedding_backward = tables
    if split and tasks.tables_in_step:
        embedding_backward = {**tables, "gradients": "rw"}
    embedding_forward = looked_up if split else {**looked_up, **dense}
    dense_forward: States = {}
    if split:
        dense_forward = {**dense, **looked_up} if late else dense
    step: States = {"gradients": "rw", "dense": "rw", "optimizer": "rw"}
    # A state is declared unless the user's on_losses is called, since the engine watches pure
    # tasks, which costs host time.
    loss: States = {"loss": "rw"} if tasks.step.on_losses is None else {}
    return {
        "start_shuffle": {"shuffler": "rw"} if shuffles else {},
        # The ticket has all that finish needs, so other batches may be started before it: the two
        # parts share no state.
        "finish_shuffle": {"shuffled rows": "rw"} if shuffles else {},
        "postprocess_input": {"postproc": "rw"},
        "start_input_dist": {"exchange of sizes": "rw"},
        "wait_input_dist": {"exchange of ids": "rw"},
        "prefetch": {"table cache": "rw"},
        "embedding_forward": {**forward, **embedding_forward},
        "dense_forward": {**forward, **dense_forward},
        "postprocess_loss": loss,
        "zero_grad": {"gradients": "rw", "optimizer": "rw"} if hands_over else {"gradients": "rw"},
        "dense_backward": backward if split and not late else {**backward, **tables},
        "embedding_backward": embedding_backward,
        "finalize_gradients": {"gradients": "rw"},
        "optimizer_step": {**step, "tables": "rw"} if tasks.tables_in_step else step,
    }


def declared(tasks: Any, state: str, mode: Mode) -> DeclaredIO:
    """Return the declaration of a state, with the memory that holds it."""
    memory: list[Any] = [*tasks.step.schedules] if state == "optimizer" else []
    if state == "tables":
        hidden = tasks.table_state
        memory = [*_rows(tasks), *([] if hidden is None else [hidden])]
    others = OTHERS.get(state, "rw")
    return DeclaredIO(state=state, mode=mode, memory=memory or None, others=others)


def _rows(tasks: Any) -> Iterator[Tensor]:
    """Yield the tables and the tensors that locate their rows; fbgemm's backward writes both."""
    sharded = tasks.rewrite.sharded.values()
    for module in sharded:
        yield from module.parameters()
    for part in table_parts(sharded):
        for name in ("weights_offsets", "weights_placements"):
            if isinstance(place := getattr(part, name, None), Tensor):
                yield place


def gradients(tasks: Any, mode: Mode) -> DeclaredIO:
    """Return the declaration of the gradients for a task that does not update the parameters.

    A shortcut of the task restores them.
    """

    def places() -> list[tuple[Any, str]]:
        """Return parameters, with the attributes that have their gradients."""
        # Megatron's wrappers keep gradients in main_grad, which is a view of a buffer.
        buffered = [p for p in tasks.model.parameters() if hasattr(p, "main_grad")]
        own = [(parameter, "grad") for parameter in tasks.step.parameters()]
        return own + [(parameter, "main_grad") for parameter in buffered]

    def capture() -> list[Tensor | None]:
        tasks.gradients.reduction.finish()
        # Copies, since a gradient is often a view of a bucket, to which the next backward writes.
        present = (getattr(*place) for place in places())
        return [None if gradient is None else gradient.detach().clone() for gradient in present]

    def restore(captured: list[Tensor | None]) -> None:
        for (parameter, name), gradient in zip(places(), captured, strict=True):
            present = getattr(parameter, name)
            if gradient is None or present is None:
                setattr(parameter, name, None if gradient is None else gradient.clone())
            else:
                present.copy_(gradient)

    return DeclaredIO(capture, restore, "gradients", mode)

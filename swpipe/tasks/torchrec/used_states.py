"""Which states the methods of ``SparseDistTasks`` use, and several methods as one task.

Its module says what the states are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from swpipe.core.task import Mode, Others, TaskFn

States: TypeAlias = dict[str, Mode]
"""State to how it is used."""

OTHERS: Mapping[str, Others] = {
    "tables": "r",
    **dict.fromkeys(("shuffler", "shuffled rows", "exchange of sizes", "exchange of ids"), ""),
    **dict.fromkeys(("current batch", "pinned rows", "table cache", "postproc"), ""),
}
"""How the loop's body touches states, where it is not free to do what it likes.

A model that it evaluates finds the tables' values whatever their cache holds, and exchanges its own
batch. Tables and postprocs that it changes while batches are in flight are refused.
"""


def used_states(
    *,
    split: bool,
    late: bool,
    fused: bool,
    hands_over: bool,
    in_step: bool,
    pinned: bool,
    shuffled: bool,
    replicas: bool,
) -> dict[str, States]:
    """Method to the states that it uses.

    Args:
        split: Embeddings and dense part have methods of their own.
        late: Some tables are looked up within the dense part all the same.
        fused: A fused optimizer is among the step's.
        hands_over: ``zero_grad`` hands its rate over to the next look-up.
        in_step: Optimizers update tables.
        pinned: Tables have a queue of prefetches.
        shuffled: There is a shuffler.
        replicas: Tables have replicas, which are averaged.
    """
    dense: States = {"dense": "r", "buffers": "rw"}
    tables: States = {"tables": "rw", "optimizer": "r"}
    looked_up: States = {"tables": "r", "table cache": "rw"}
    if fused:
        looked_up["optimizer"] = "r"
    # Besides the gradients, it uses what the forward has used.
    backward: States = {"gradients": "rw", "optimizer": "r", "dense": "r", "buffers": "rw"}
    # The replaced forwards use the context of one batch; each task that runs them sets it.
    forwards: States = {"current batch": "rw"}
    # What each batch has pinned in the tables' cache, whose queue keeps their order.
    embedding_backward: States = {"pinned rows": "rw"} if pinned else {}
    if split or replicas:
        embedding_backward = tables
    if split and in_step:
        embedding_backward = {**tables, "gradients": "rw"}
    step: States = {"gradients": "rw", "dense": "rw", "optimizer": "rw"}
    return {
        "start_shuffle": {"shuffler": "rw"} if shuffled else {},
        # It takes a batch and its ticket, so that other batches may be started before.
        "finish_shuffle": {"shuffled rows": "rw"} if shuffled else {},
        "postprocess_input": {"postproc": "rw"},
        "start_input_dist": {"exchange of sizes": "rw"},
        "wait_input_dist": {"exchange of ids": "rw"},
        "prefetch": {"table cache": "rw"},
        "embedding_forward": forwards | (looked_up if split else looked_up | dense),
        "dense_forward": (forwards | dense | (looked_up if late else {})) if split else {},
        "zero_grad": {"gradients": "rw", **({"optimizer": "rw"} if hands_over else {})},
        "dense_backward": backward if split and not late else backward | tables,
        "embedding_backward": embedding_backward,
        "finalize_gradients": {"gradients": "rw"},
        "optimizer_step": step | ({"tables": "rw"} if in_step else {}),
    }


def together(methods: Iterable[str], used: Mapping[str, States]) -> States:
    """The states that a task with these methods uses."""
    modes: States = {}
    for method in methods:
        for state, mode in used.get(method, {}).items():
            modes[state] = mode if modes.get(state, mode) == mode else "rw"
    return modes


@dataclass(frozen=True, slots=True)
class InTurn:
    """Calls several functions of the context, one after the other."""

    parts: tuple[TaskFn, ...]

    def __call__(self, ctx: Any) -> None:
        for part in self.parts:
            part(ctx)

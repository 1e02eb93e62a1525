"""How the tasks of a step treat the model and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from swpipe.tasks.torchrec.embedding_tables.released import MemoryOptions
from swpipe.tasks.torchrec.embedding_tables.table_state import CaptureRestore
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from swpipe.tasks.torchrec.shuffling.shuffle import Shuffler

Find: TypeAlias = Literal["trace", "direct"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What of a step's tasks is not in the model, nor in ``TrainStep``.

    Attributes:
        forward: "split" (embeddings and dense part in separate tasks), "ahead" (the same, with one
            backward), "prefetch", "pipelined", or "own": the model runs as it is, and needs no
            sharded module.
        find: How the sharded modules' inputs are found: "trace" with torch.fx, or "direct" by type.
        inputs: Module name to the path of its input within the batch, for inputs not to be found.
        strict: A sharded module that cannot be pipelined is an error; otherwise it keeps its own
            forward, and the report says so.
        shuffler: Redistributes the rows of all ranks' batches.
        pipeline_postproc: Modules without parameters that compute inputs of sharded modules run
            ahead of the forward, in a twelfth task (see ``plans.sparse_dist.with_postproc``).
        zero_grad: The task that calls the optimizers' ``zero_grad``, which also hands the learning
            rates over to fused tables: EmbForward (first), DenseBackward (first) or OptimStep
            (last). A look-up then takes the rate that was handed over last, as in TorchRec's
            pipelines. None: DenseBackward, and each look-up takes the rate of its moment.
        memory: What saves device memory; the numbers are the same.
        random: The model draws random numbers (dropout): each forward is then seeded.
        tables_state: Two functions that capture and restore this rank's rows, for profiling and
            recording, where the rows lie in no parameter or buffer. What ``capture`` returns is
            copied with ``copy.deepcopy``, once to keep it and once for each ``restore``.
        grouped: Other tasks than the eleven: name to the methods of ``SparseDistTasks`` that it
            calls, in serial order.
        functions: What the tasks call in place of their own functions: "copy" gets the batch and
            returns it on the device; "start_input_dist" gets the batch and its context,
            "wait_input_dist" the context; "postprocess_loss" turns the losses into what
            "dense_backward" gets; "optimizer_step" updates the parameters, and "watch" is called
            after that, both without arguments.
    """

    forward: Kind = "split"
    find: Find = "trace"
    inputs: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    shuffler: Shuffler | None = None
    pipeline_postproc: bool = False
    zero_grad: str | None = None
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    random: bool = False
    tables_state: CaptureRestore | None = None
    grouped: Mapping[str, Sequence[str]] | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

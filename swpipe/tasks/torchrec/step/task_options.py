"""The options that say how a step's tasks treat the model and its batches."""

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
    """The options of a step's tasks that neither the model nor ``TrainStep`` holds.

    Attributes:
        forward: "split" (embeddings and dense part in separate tasks), "ahead" (the same, with one
            backward), "prefetch", "pipelined", or "own": the model runs unmodified, and needs no
            sharded module.
        find: How the sharded modules' inputs are found: "trace" with torch.fx, or "direct" by type.
        inputs: Module name to the path of its input within the batch; these inputs are not
            searched.
        strict: If true, a sharded module that cannot be pipelined is an error. Otherwise it keeps
            its own forward, and the report says so.
        shuffler: Redistributes the rows of all ranks' batches.
        pipeline_postproc: Modules without parameters that compute inputs of sharded modules run
            ahead of the forward, in a twelfth task (see ``plans.sparse_dist.with_postproc``).
        zero_grad: The task that calls the optimizers' ``zero_grad``, which also hands the learning
            rates over to fused tables: EmbForward (first), DenseBackward (first) or OptimStep
            (last). A look-up then uses the rate that was handed over last, as in TorchRec's
            pipelines. None: DenseBackward calls it, and each look-up uses the current rate.
        memory: Options that save device memory; the numbers are the same.
        random: The model draws random numbers (dropout): each forward is then seeded.
        tables_state: Two functions that capture and restore this rank's rows, for profiling and
            recording, where the rows lie in no parameter or buffer. The result of ``capture`` is
            copied with ``copy.deepcopy``, once to keep it and once for each ``restore``.
        grouped: Tasks other than the eleven: name to the methods of ``SparseDistTasks`` that it
            calls, in serial order.
        functions: Functions that the tasks call in place of their own. "copy" gets the batch and
            returns it on the device. "start_input_dist" gets the batch and its context,
            "wait_input_dist" the context. "postprocess_loss" turns the losses into the argument of
            "dense_backward". "optimizer_step" updates the parameters, and "watch" is called after
            it, both without arguments.
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

"""TorchRec's pipelines that keep tables, caches or optimizer state on the host between two uses.

    period      EmbForward   DenseForward, LossPostprocess   DenseBackward   EmbBackward   OptimStep
    tables         used      ------ on the host ----------    copied back       used
    optimizer                ------ on the host ---------------------------  copied back     used

Both are complete on the device between two calls of ``progress``, so the loop may save them there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from swpipe.core.plan import PipelinePlan
from swpipe.device.offload import Offload, with_offload
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec._torchrec import FusedOptimizer
from swpipe.tasks.torchrec.embedding_tables.table_state import table_parts
from swpipe.tasks.torchrec.pipelines.named import In, Out, TrainPipelineSparseDist
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
from swpipe.tasks.torchrec.step.train_step import innermost
from swpipe.values import tensors_in


class TrainPipelineSparseDistOptStash(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class: optimizer state is on the host until the embedding backward.

    The dense forward begins when the copy to the host is finished. ``site_fqn`` and
    ``sharding_type`` have no effect. The state of optimizers that are fused into tables stays on
    the device.
    """

    # The split forward, since the copy back overlaps the embedding backward as a task of its own.
    _kind = "split"

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        # Nothing but OptimStep uses the state, so it leaves before the forward allocates. It comes
        # back beside the embedding backward, when the dense part's activations are freed.
        pair = Offload(
            "optimizer state",
            plans.PREFETCH,
            plans.STEP,
            tasks.device,
            tensors=partial(_states, tasks.step.optimizers),
            freed=plans.DENSE,
            during=plans.EMBED_BACK,
            state="optimizer state",
        )
        return with_offload(replace(super()._plan(tasks), tasks=tasks.tasks()), [pair])


class TrainPipelineSparseDistEmbStash(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class: moves tables with ``stash_weights=True`` to the host.

    They are on the host during the dense part, and the dense forward begins when the copy to the
    host is finished. ``site_fqn``, ``delay_stash`` and ``stash_site_fqn`` have no effect.
    """

    # The split forward, so that nothing touches the tables between EmbForward and EmbBackward.
    _kind = "split"

    _caches: ClassVar[bool] = False
    """Whether the caches of tables in host memory are moved too."""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        tensors = partial(_stashed, tasks.rewrite.sharded.values(), self._caches)
        # A rank may have no row of a marked table, which then has a tensor without elements.
        if not any(tensor.numel() for tensor in tensors()):
            cached = ", and none has a cache" if self._caches else ""
            warnings.warn(
                f"{type(self).__name__}: no table of this rank has stash_weights=True in its "
                f"configuration{cached}, so none is moved to the host",
                RuntimeWarning,
                stacklevel=2,
            )
        pair = Offload(
            "tables",
            plans.EMBED,
            plans.EMBED_BACK,
            tasks.device,
            tensors=tensors,
            freed=plans.DENSE,
            state="rows on the device",
        )
        return with_offload(replace(super()._plan(tasks), tasks=tasks.tasks()), [pair])


class TrainPipelinePrefetchEMS(TrainPipelineSparseDistEmbStash[In, Out]):
    """Counterpart of TorchRec's class: moves the caches of tables in host memory, too.

    A cache comes back with the rows that it had. TorchRec's class writes these to the table, and
    fetches them again.
    """

    _caches = True


def _states(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the state tensors of the optimizers that step the dense part."""
    for optimizer in optimizers:
        for inner in innermost(optimizer):
            if not isinstance(inner, FusedOptimizer):
                yield from tensors_in([*inner.state.values()])


def _stashed(modules: Iterable[nn.Module], caches: bool) -> Iterator[Tensor]:
    """Yield the rows of fbgemm's tables that are to be stashed, chosen as TorchRec chooses them."""
    for part in table_parts(modules):
        # Private attributes of TorchRec's kernels and of fbgemm's tables (TorchRec 1.8); classes
        # that lack them have nothing to stash.
        kernel = getattr(part, "_emb_module", None)
        config = getattr(part, "_config", None)
        tables = getattr(config, "embedding_tables", ())
        names = ["lxu_cache_weights"] if caches else []
        if any(getattr(table, "stash_weights", False) for table in tables):
            names += ["weights_dev", "weights_host"]
        rows = (getattr(kernel, name, None) for name in names)
        yield from (tensor for tensor in rows if isinstance(tensor, Tensor))

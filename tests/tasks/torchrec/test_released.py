"""Ids are freed after their exchange, on every supported TorchRec."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe._values.walk import tensors_in
from swpipe.device.cpu import CpuDevice
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import (
    MemoryOptions,
    RewriteError,
    SparseDistPipeline,
    SparseDistTasks,
    TaskOptions,
    TrainStep,
)
from swpipe.tasks.torchrec.embedding_tables.released import MARK, Released, Releases
from swpipe.tasks.torchrec.rewriting.exchanged import CallInputs
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Job,
    KeyedJaggedTensor,
    batches,
    dense_optimizer,
    sharded,
)
from tests.tasks.torchrec.trial import ALL_MEMORY, to_the_end


def test_the_names_of_every_torchrec_are_known() -> None:
    """In 1.5 the copy in place has another name; an argument that it lacks is disabled."""
    assert MemoryOptions.of({"inplace_copy_batch_to_gpu": True}) == MemoryOptions(
        enable_inplace_copy_batch=True
    )
    assert not MemoryOptions.of({"model": None})
    given = dict.fromkeys(MemoryOptions.__dataclass_fields__, True)
    assert MemoryOptions.of(given) == ALL_MEMORY


def test_what_went_has_shape_type_and_device_and_no_memory() -> None:
    """Every operator that reads it raises, and so do lists."""
    gone = Released(torch.arange(6).view(2, 3))
    assert (gone.shape, gone.dtype, gone.device) == (torch.Size([2, 3]), torch.int64, CPU)
    assert gone.untyped_storage().nbytes() == 0
    assert type(gone.detach()) is type(copy.deepcopy(gone)) is Released
    assert repr(gone) == "Released((2, 3), torch.int64)"
    for read in (lambda: gone + 1, lambda: gone[0], lambda: torch.equal(gone, gone)):
        with pytest.raises(RewriteError, match="whose memory was freed after the exchange"):
            read()


def test_what_went_is_known_in_a_new_container() -> None:
    """It is the exchanged input, with any values."""
    one, other = (Released(torch.arange(4)) for _ in range(2))
    lengths = torch.tensor([2, 2])

    def ids(values: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f0", "f1"], values, lengths=lengths)

    used = CallInputs([ids(one, lengths)], {})
    assert not used.mismatch([ids(one, lengths)], {})
    assert used.mismatch([ids(other, lengths)], {})
    gone = Released(lengths)
    used = CallInputs([ids(one, gone)], {})
    assert not used.mismatch([ids(one, gone)], {})
    assert used.mismatch([ids(one, Released(lengths))], {})


def test_what_one_module_copies_stays_for_another_that_does_not() -> None:
    """The batch's ids keep the lists that the first one has computed."""
    ids = KeyedJaggedTensor(["f0", "f1"], torch.arange(4), lengths=torch.tensor([1, 3]))
    releases = Releases(ALL_MEMORY, CpuDevice())
    ((copied,), _), ((kept,), _) = (releases.lent(([ids], {})) for _ in range(2))
    assert copied.length_per_key() == [1, 3]
    inputs = {"tables": CallInputs([ids], {})}
    contexts = [SimpleNamespace(early_releasable_inputs=[copied]), SimpleNamespace(kept=kept)]
    modules = dict(enumerate(contexts))
    context: Any = SimpleNamespace(computed=None, inputs=inputs, module_contexts=modules)
    releases.started(context)
    assert isinstance(ids.values(), Released)
    assert isinstance(ids.lengths(), Released)
    assert ids.length_per_key() == [1, 3]
    assert kept.values().tolist() == [0, 1, 2, 3]
    assert kept.lengths().tolist() == [1, 3]


class _Held(CpuDevice):
    """A device that records the size of memory when it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def hold(self, values: Any, streams: Any) -> None:
        tensors = [tensor for value in values for tensor in tensors_in(value)]
        self.bytes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))


def _held() -> list[int] | None:
    device, model = _Held(), sharded(Job())
    step = TrainStep([dense_optimizer(Job(), model)])
    memory = MemoryOptions(free_features_storage_early=True)
    tasks = SparseDistTasks(model, step, TaskOptions(memory=memory), device=device)
    with SparseDistPipeline(tasks, plans.sparse_dist(lean=True)) as pipeline:
        to_the_end(pipeline, batches(3))
    marked = any(hasattr(module, MARK) for module in tasks.rewrite.sharded.values())
    return device.bytes if marked else None


def test_memory_is_held_for_the_exchange_before_it_goes(two_ranks: Ranks) -> None:
    """It belongs to the stream for copies, and the exchange may still read it."""
    for held in two_ranks.run(_held):
        if held is None:
            pytest.skip("modules of this TorchRec do not say what they have copied")
        assert len(held) == 3
        assert 0 not in held

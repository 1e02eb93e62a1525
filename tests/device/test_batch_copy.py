"""The copy of batches, and the buffers that it reuses, on a device that is late."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe.device import BatchCopy, CpuDevice, copy_task, gives_pinned
from swpipe.device.pinned_pool import PinnedPool, Transfer, _Buffer


class Reached:
    """An event that is reached on a test's request, or after a number of queries.

    Attributes:
        reached: Whether it is.
        looks: The number of queries after which it is reached; None for never.
        recorded: The number of times that it was recorded.
    """

    def __init__(self) -> None:
        self.reached = True
        self.looks: int | None = None
        self.recorded = 0

    def record(self, stream: Any) -> None:
        self.reached = False
        self.recorded += 1

    def wait(self, stream: Any) -> None:
        return None

    def query(self) -> bool:
        if self.looks is not None:
            self.looks -= 1
            self.reached |= self.looks <= 0
        return self.reached


class LateDevice(CpuDevice):
    """A device, named "meta", that reads the sources of copies when its events are reached."""

    name = "meta"
    pins_memory = True

    def __init__(self) -> None:
        self.events: list[Reached] = []

    def new_event(self, *, timing: bool = False) -> Any:
        self.events.append(Reached())
        return self.events[-1]


class Pool(PinnedPool):
    """A pool whose buffers are not pinned, since pinning needs an accelerator.

    Attributes:
        buffers: All buffers that were made.
    """

    def __init__(self, device: LateDevice, most: int) -> None:
        super().__init__(device, most)
        self.buffers: list[_Buffer] = []

    def _new_buffer(self, size: int) -> _Buffer:
        memory = torch.zeros(size, dtype=torch.uint8)
        self.buffers.append(_Buffer(memory, self._device.new_event()))
        return self.buffers[-1]

    def copied(self, *sources: Tensor) -> list[Tensor]:
        """Return copies of some tensors of one batch."""
        transfers = [Transfer(source, torch.empty_like(source)) for source in sources]
        self.copy(transfers)
        return [target for _, target in transfers]


def test_a_buffer_is_written_again_when_the_copies_from_it_have_ended() -> None:
    """Until then another buffer is written; each copy is recorded once."""
    device = LateDevice()
    pool = Pool(device, most=3)
    for number in (1, 2):
        pool.copied(torch.full((8,), number, dtype=torch.uint8))
    first, second = pool.buffers
    assert first.memory[:8].tolist() == [1] * 8
    assert second.memory[:8].tolist() == [2] * 8
    device.events[0].reached = True
    pool.copied(torch.full((8,), 3, dtype=torch.uint8))
    assert len(pool.buffers) == 2
    assert first.memory[:8].tolist() == [3] * 8
    assert [event.recorded for event in device.events] == [2, 1]


def test_the_host_waits_for_the_oldest_buffer_where_there_are_as_many_as_allowed() -> None:
    """It waits for no younger buffer."""
    device = LateDevice()
    pool = Pool(device, most=2)
    for number in (1, 2):
        pool.copied(torch.full((8,), number, dtype=torch.uint8))
    device.events[0].looks = 5
    pool.copied(torch.full((8,), 3, dtype=torch.uint8))
    assert device.events[0].looks == 0
    assert [buffer.memory[0].item() for buffer in pool.buffers] == [3, 2]


def test_a_copy_that_fails_keeps_its_buffer_until_the_device_has_read_it() -> None:
    """The part that was submitted before the failure still reads it."""
    device = LateDevice()
    pool = Pool(device, most=2)
    wrong = Transfer(torch.ones(2), torch.ones(3))
    with pytest.raises(RuntimeError):
        pool.copy([Transfer(torch.ones(4), torch.ones(4)), wrong])
    assert device.events[0].recorded == 1
    pool.copied(torch.zeros(4))
    assert len(pool.buffers) == 2


def test_copies_have_the_values_and_strides_of_their_sources() -> None:
    """One buffer has several tensors, of all types, sizes and memory layouts."""
    sources = [
        torch.arange(5, dtype=torch.int64),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.tensor(7.0, dtype=torch.float64),
        torch.randn(4, 6).T,
        torch.tensor([True, False]),
        torch.arange(10)[::2],
    ]
    for source, target in zip(sources, Pool(LateDevice(), 1).copied(*sources), strict=True):
        assert torch.equal(source, target)
        assert target.stride() == torch.empty_like(source).stride()


def test_a_batch_that_does_not_fit_gets_a_larger_buffer() -> None:
    """It replaces the buffer that was free."""
    device = LateDevice()
    pool = Pool(device, most=1)
    pool.copied(torch.ones(4))
    device.events[0].reached = True
    (target,) = pool.copied(torch.ones(4000))
    assert torch.equal(target, torch.ones(4000))
    assert len(pool.buffers) == 2


class Noting(PinnedPool):
    """A pool that records the tensors to copy."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []

    def copy(self, transfers: Iterable[Transfer]) -> None:
        self.sources += [source for source, _ in transfers]


def test_only_ordinary_tensors_go_through_buffers() -> None:
    """Tensors that autograd watches, without elements, or on the device are moved directly."""
    copy = BatchCopy(LateDevice(), ("x",), 2)
    pool = copy._pool = Noting()
    plain, leaf, empty = torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(0)
    there, sparse = torch.ones(2, device="meta"), torch.eye(2).to_sparse()
    ctx = SimpleNamespace(x={"all": [plain, leaf, empty, there, sparse, "a"]}, y=torch.ones(2))
    copy(ctx)
    assert [id(source) for source in pool.sources] == [id(plain)]
    *moved, text = ctx.x["all"]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert moved[1].grad_fn is not None
    assert moved[3] is there
    assert (text, ctx.y.device.type) == ("a", "cpu")


class Owned:
    """An object with a ``to`` of its own."""

    def __init__(self, place: object) -> None:
        self.place, self.pinned = place, False

    def pin_memory(self) -> Owned:
        self.pinned = True
        return self

    def to(self, place: Any, non_blocking: bool = False) -> Any:
        assert non_blocking
        return Owned(place) if self.pinned else None


def test_an_object_is_moved_by_itself_from_pinned_memory() -> None:
    """A ``to`` that returns nothing is an error that says what to fix."""
    ctx = SimpleNamespace(x=Owned("cpu"))
    BatchCopy(LateDevice(), ("x",), 2)(ctx)
    assert ctx.x.place == torch.device("meta")
    pageable = LateDevice()
    pageable.pins_memory = False
    with pytest.raises(TypeError, match="returned None") as caught:
        BatchCopy(pageable, ("x",), 2)(SimpleNamespace(x=Owned("cpu")))
    assert "returns it on the device" in caught.value.__notes__[0]


def test_a_copy_says_what_it_is_given_wrong() -> None:
    """Names of attributes and at least one buffer are needed; on the CPU the task does nothing."""
    with pytest.raises(TypeError, match="copy_task takes names of attributes, not 3"):
        copy_task("cpu", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffers is 0: give 1 or more"):
        copy_task("cpu", buffers=0)
    batch = torch.ones(2)
    ctx = SimpleNamespace(batch=batch)
    copy_task("cpu")(ctx)
    assert ctx.batch is batch
    own = SimpleNamespace(batch=Owned("cpu"))
    copy_task("cpu")(own)
    assert not own.batch.pinned
    assert copy_task("cpu", "x", "y").reads == ("x", "y")


def test_batches_of_a_list_are_pinned_if_the_first_is() -> None:
    """A loader that is not apart may yield anything."""
    assert not gives_pinned([torch.ones(2)])
    assert gives_pinned([torch.ones(2, device="meta")])
    assert gives_pinned([1])
    assert not gives_pinned(iter([1]))

"""A sample of a tensor's content shows changes without a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe._values.storages import Storages
from swpipe.device import CpuDevice, Stream
from swpipe.inference.sampled_contents import SampledContents, UsedMemory


def used(*tensors: Tensor) -> list[UsedMemory]:
    """Return the record of a task that has read these tensors."""
    storages = Storages()
    numbers = [(tensor, *storages.of(tensor)) for tensor in tensors]
    return [UsedMemory(n, f"[{n}]", tensor, storages.reference(n)) for tensor, n in numbers]


def told(*tensors: Tensor, change: Callable[[], object] | None = None) -> list[int]:
    """Return the iterations at which tensors are found changed, if they change before the third."""
    contents, found = SampledContents(CpuDevice()), []
    for iteration in range(5):
        if iteration == 3 and change is not None:
            change()
        contents.compare(iteration, used(*tensors))
        found += [one.iteration for one in contents.changed()]
    return found


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.float32), (5_000, torch.bfloat16), (5_000, torch.bool), (100_000, torch.int64)],
)
def test_a_change_through_data_shows(count: int, dtype: torch.dtype) -> None:
    """It shows on the next iteration, and on no other."""
    tensor = torch.ones(count, dtype=dtype)
    assert told(tensor) == []
    assert told(tensor, change=lambda: tensor.data.zero_()) == [3]
    assert tensor._version == 0


def test_other_memory_with_the_same_values_is_no_change() -> None:
    """It was moved away and back, for example."""
    tensor = torch.rand(8)
    assert told(tensor, change=lambda: setattr(tensor, "data", tensor.data.clone())) == []
    assert told(tensor, change=lambda: setattr(tensor, "data", tensor.data * 2)) == [3]


def test_what_has_no_content_to_compare() -> None:
    """These are freed memory, elements that are no numbers, and a part with gaps."""
    tensor = torch.rand(8)
    assert told(tensor, change=lambda: tensor.untyped_storage().resize_(0)) == []
    number = torch.rand(8, dtype=torch.complex64)
    assert told(number, change=lambda: number.data.zero_()) == []
    matrix = torch.rand(8, 8)
    assert told(matrix[:, 0], change=lambda: matrix.data.zero_()) == []
    rows = torch.rand(8, 8).t()  # without gaps, in another order
    assert told(rows, change=lambda: rows.data.zero_()) == [3]


def test_a_few_of_many_are_looked_at() -> None:
    """They are of all parts of a model, including the last."""
    tensors = [torch.rand(4) for _ in range(100)]
    found = told(*tensors, change=lambda: [one.data.add_(1) for one in tensors])
    assert 10 <= len(found) <= 16
    assert told(*tensors, change=lambda: tensors[-1].data.zero_()) == [3]


def test_the_answer_of_a_device_is_read_when_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names its iteration."""
    reached: list[bool] = []

    class Event:
        def record(self, stream: Stream) -> None:
            reached.append(False)

        def wait(self, stream: Stream) -> None:
            raise AssertionError

        def query(self) -> bool:
            return reached[0]

    device = CpuDevice()
    monkeypatch.setattr(device, "new_event", Event)
    contents, tensor = SampledContents(device), torch.ones(8)
    for iteration in range(3):
        contents.compare(iteration, used(tensor))
        tensor.data.add_(1)
        assert [*contents.changed()] == []
    reached[0] = True
    assert [one.iteration for one in contents.changed()] == [2]
    assert [*contents.changed()] == []


def test_modes_of_the_user_do_not_see_it() -> None:
    """Examples are a mode that counts operators, and one that counts memory."""

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        assert told(torch.ones(8)) == []
    assert names == ["ones.default"]


def test_what_is_known_does_not_grow_with_the_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task has new batches in each iteration."""
    monkeypatch.setattr("swpipe.inference.pruned_dict._SPARE", 50)
    contents, kept = SampledContents(CpuDevice()), torch.ones(8)
    for iteration in range(200):
        contents.compare(iteration, used(kept, torch.ones(3)))
    assert len(contents._known) < 60
    kept.data.zero_()
    contents.compare(200, used(kept, torch.ones(3)))
    assert [one.iteration for one in contents.changed()] == [200]

"""``overlap(device=)`` and ``prefetch_plan(device=)``: batches are copied ahead of the loop.

The device's streams are late, freed memory is poisoned, and the link is slow. A missing wait, a
buffer that is reused too soon, and memory that is not held thus show in the values.
"""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

import swpipe
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.device import copy_task, resolve
from swpipe.device.pinned_pool import PinnedPool, Transfer
from swpipe.errors import PlanError
from swpipe.inference import record
from swpipe.plans import prefetch_plan
from swpipe.profiler import TaskProfiler
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, extremes, spin, wrong
from tests.support.budget import examples

pytestmark = pytest.mark.skipif(
    not SIMULATED or backend.why_not() is not None, reason="these tests have the link be slow"
)

BATCHES = 20
"""More batches than are watched."""

ROWS = 1024
LINK = 4e5
"""The speed of the link in us per MiB: 1.5 ms for a batch of ``ROWS`` floats."""

LATE_MS = 4.0
DEADLINE_S = 20.0


@pytest.fixture
def slow() -> Iterator[None]:
    """Use a slow link, late streams and poisoned memory."""
    with backend.misbehaving(late_streams=200.0, poison=True, link_us_per_mib=LINK):
        yield


def filled(value: int) -> Tensor:
    """Return a batch with the given value, in pageable memory."""
    return torch.full((ROWS,), float(value))


# ------------------------------------------------------------------------------- forms of batches

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    """A batch that is opened by its attributes."""

    x: Tensor
    name: str
    more: dict[str, Any] = field(default_factory=dict)


class Movable:
    """A batch with a ``to`` of its own, which does not move the lengths."""

    def __init__(self, x: Tensor, lengths: Tensor) -> None:
        self.x, self.lengths = x, lengths

    def to(self, device: torch.device, non_blocking: bool = False) -> Movable:
        """Return the batch on the device, with its lengths on the host."""
        return Movable(self.x.to(device, non_blocking=non_blocking), self.lengths)


class Pinnable:
    """A batch with ``pin_memory``, and a ``to`` that takes the device only."""

    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def pin_memory(self) -> Pinnable:
        """Return the batch in pinned memory."""
        return Pinnable(self.x.pin_memory())

    def to(self, device: torch.device) -> Pinnable:
        """Return the batch on the device; the copy reads pinned memory later."""
        assert self.x.is_pinned()
        return Pinnable(self.x.to(device, non_blocking=True))


def jagged(i: int) -> Any:
    """Return a nested tensor of torch."""
    rows = [torch.full((3 + i % 3,), float(i)), torch.arange(4.0)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def keyed(i: int) -> Any:
    """Return a jagged tensor of TorchRec."""
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor")
    lengths = torch.tensor([1, 2, i % 3, 1])
    values = torch.arange(int(lengths.sum())) + i
    return sparse.KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths)


def images(i: int) -> Tensor:
    """Return images in the format channels-last."""
    return torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last) + i


FORMS: dict[str, Callable[[int], Any]] = {
    "a tensor": filled,
    "a tuple": lambda i: (filled(i), torch.tensor([i]), "name", None),
    "a named tuple": lambda i: Pair(filled(i), [torch.tensor(i)]),
    "a dict": lambda i: {"x": filled(i), "y": {"z": torch.tensor([True, False])}, "i": i},
    "a dataclass": lambda i: Sample(filled(i), f"{i}", {"y": (torch.tensor(i),)}),
    "a jagged tensor": lambda i: (jagged(i), filled(i)),
    "a keyed jagged tensor": lambda i: Sample(filled(i), "k", {"ids": keyed(i)}),
    "a packed sequence": lambda i: pack_sequence([filled(i), torch.arange(3.0)]),
    "an object with to": lambda i: Movable(filled(i), torch.tensor([i])),
    "an object with to and pin_memory": lambda i: {"a": [Pinnable(filled(i))]},
    "pinned": lambda i: (filled(i).pin_memory(), filled(i)),
    "on the device": lambda i: (filled(i).to("sim"), filled(i)),
    "other types": lambda i: [
        torch.full((3,), i + 1j),
        *(torch.full((5,), i, dtype=one) for one in (torch.bfloat16, torch.int8, torch.float64)),
        *(torch.empty(0, 4), torch.tensor(i), torch.full((3,), i + 1j).conj()),
    ],
    "other strides": lambda i: [
        *(images(i), filled(i).view(32, 32).t(), filled(i)[::3]),
        *(torch.tensor([float(i)]).expand(7), filled(i)[5:9]),
        *(torch._neg_view(filled(i)), torch.full((3,), i + 1j).conj().imag),
    ],
}


def by_hand(value: Any) -> Any:
    """Move a batch as the first lines of a plain loop do."""
    if isinstance(value, Tensor) or hasattr(value, "pin_memory"):
        pinned = value.pin_memory() if isinstance(value, Pinnable) else value
        return pinned.to(DEVICE)
    if isinstance(value, Movable):
        return value.to(DEVICE)
    if isinstance(value, Pair):
        return Pair(*map(by_hand, value))
    if isinstance(value, tuple | list):
        return type(value)(map(by_hand, value))
    if isinstance(value, dict):
        return {key: by_hand(one) for key, one in value.items()}
    if isinstance(value, Sample):
        return Sample(by_hand(value.x), value.name, by_hand(value.more))
    return value


def flat(value: Any) -> list[Any]:
    """Return the contents of a batch: properties and copies of tensors, and all else as it is."""
    if type(value) is Tensor:
        lazy = value.is_conj(), value.is_neg()
        return [value.device, value.dtype, value.stride(), lazy, value.clone()]
    if isinstance(value, Tensor):
        return [*flat(value.values()), *flat(value.offsets())]  # type: ignore[no-untyped-call]
    if isinstance(value, tuple | list):
        return [type(value), *(part for one in value for part in flat(one))]
    if isinstance(value, dict):
        return [*value, *(part for one in value.values() for part in flat(one))]
    if hasattr(value, "offset_per_key"):
        return [value.keys(), *flat(value.values()), *flat(value.lengths())]
    if isinstance(value, Pinnable):
        return flat(value.x)
    return flat(vars(value)) if isinstance(value, Movable | Sample) else [value]


def plain(batches: list[Any], use: Callable[[Any], Any]) -> list[Any]:
    """Run a plain loop."""
    return [use(by_hand(batch)) for batch in batches]


def overlapped(batches: list[Any], use: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Run the same loop with the copy ahead."""
    seen: list[Any] = []

    def train(ctx: IterContext) -> None:
        spin(0.2)
        seen.append(use(ctx.batch))

    with swpipe.overlap(batches, [train], device=DEVICE, **options) as loop:
        for ctx in loop:
            del ctx
    return seen


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Check that contents are equal bit for bit."""
    torch.accelerator.synchronize()
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert [x for x in a if not isinstance(x, Tensor)] == [
            x for x in b if not isinstance(x, Tensor)
        ]
        torch.testing.assert_close(
            [x.cpu() for x in a if isinstance(x, Tensor)],
            [x.cpu() for x in b if isinstance(x, Tensor)],
            rtol=0,
            atol=0,
        )


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_those_of_the_plain_loop(form: str, slow: None) -> None:
    """Places, type, strides and values are equal; what is no tensor is kept."""
    batches = [FORMS[form](i) for i in range(BATCHES)]
    assert_same(overlapped(batches, flat), plain(batches, flat))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_passes_in_other_modes_use_the_same_buffers(mode: Callable[[], Any], slow: None) -> None:
    """Memory of inference mode could not be written outside of it."""
    batches = [(filled(i),) for i in range(BATCHES)]
    plan = prefetch_plan([], [PipelineTask("use", lambda ctx: None)], device=DEVICE)
    with SWPipeline(plan, device=DEVICE) as pipe:
        with mode():
            first = [ctx.batch[0] for ctx in pipe.iterate(batches)]
        then = [ctx.batch[0] for ctx in pipe.iterate(batches)]
    assert [one.is_inference() for one in (first[0], then[0])] == [
        mode is torch.inference_mode,
        False,
    ]
    for found in (first, then):
        assert_same([[one] for one in found], [[one.to(DEVICE)] for (one,) in batches])


def test_a_tensor_that_is_there_twice_is_copied_once(slow: None) -> None:
    """It is one tensor on the device, too."""
    x = filled(1)
    same = overlapped([(x, {"again": x})] * 3, lambda batch: batch[0] is batch[1]["again"])
    assert same == [True] * 3


def test_what_is_on_the_device_or_has_no_tensor_is_the_same_object(slow: None) -> None:
    """This includes a module, which ``to`` would change in place."""
    there, module, other = filled(1).to(DEVICE), nn.Linear(2, 2), object()
    batches = [(there, module, other)] * 3
    found = overlapped(
        batches, lambda batch: [a is b for a, b in zip(batch, batches[0], strict=True)]
    )
    assert found == [[True] * 3] * 3
    assert module.weight.is_cpu


def test_gradients_of_a_batch_reach_the_host(slow: None) -> None:
    """They do so as in a plain loop."""

    def gradients(ahead: bool) -> list[Tensor]:
        batches = [(filled(i).requires_grad_(), filled(2)) for i in range(5)]

        def use(batch: Any) -> None:
            (batch[0] * batch[1]).square().sum().backward()

        (overlapped if ahead else plain)(batches, use)
        torch.accelerator.synchronize()
        return [x.grad for x, _ in batches if x.grad is not None]

    assert_same([gradients(True)], [gradients(False)])


# ------------------------------------------------------------------------------------- buffers


def consumer_waits() -> list[int]:
    """Read batches in a task while they are being copied; return the wrong iterations."""
    seen: dict[int, Tensor] = {}

    def train(ctx: IterContext) -> None:
        seen[ctx.iter_idx] = extremes(ctx.batch)

    with swpipe.overlap([filled(i + 1) for i in range(12)], [train], device=DEVICE) as loop:
        for _ in loop:
            pass
    return wrong(seen)


def test_a_task_reads_what_was_copied() -> None:
    """It waits for the copy; without a wait for earlier copies a buffer is written too early."""
    with backend.misbehaving(link_us_per_mib=LINK):
        assert consumer_waits() == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PinnedPool, "_is_free", lambda pool, buffer: True)
            assert consumer_waits() != []


def pool_of(plan: Any) -> Any:
    """Return the pool of a plan's copy."""
    return plan.tasks[0].fn._pool


@examples("copies", 25)
@given(
    most=st.integers(1, 4),
    batches=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), max_size=8),
    link=st.sampled_from([0, 1e5]),
)
def test_no_copy_reads_what_a_later_one_has_written(
    most: int, batches: list[list[int]], link: float
) -> None:
    """This holds for any sizes, with a limited number of buffers that are large enough."""
    pool = PinnedPool(resolve(DEVICE), most)
    kept: list[Transfer] = []
    with backend.misbehaving(late_streams=100.0, link_us_per_mib=link):
        for number, sizes in enumerate(batches):
            sources = [torch.full((size,), number, dtype=torch.int16) for size in sizes]
            moved = [Transfer(one, torch.empty_like(one, device=DEVICE)) for one in sources]
            pool.copy(moved)
            kept += moved
            assert len(pool._used) <= min(most, number + 1)
    assert all(torch.equal(source, target.cpu()) for source, target in kept)


def test_a_copy_that_fails_midway_keeps_its_buffer() -> None:
    """It keeps it until earlier copies have ended; no other buffer is made."""
    pool = PinnedPool(resolve(DEVICE), 1)
    first, last = (
        Transfer(one, torch.empty_like(one, device=DEVICE)) for one in map(filled, (1, 2))
    )
    broken = Transfer(filled(0), torch.empty(1, device=DEVICE))
    with backend.misbehaving(link_us_per_mib=LINK):
        with pytest.raises(RuntimeError):
            pool.copy([first, broken])
        (kept,) = pool._used
        pool.copy([last])
    assert [one.memory.data_ptr() for one in pool._used] == [kept.memory.data_ptr()]
    assert all(torch.equal(source, target.cpu()) for source, target in (first, last))


@pytest.mark.parametrize("serial", [False, True])
def test_buffers_are_used_again(serial: bool, slow: None) -> None:
    """There is one per iteration in flight, over passes, sizes and serial iterations."""
    addresses: set[int] = set()
    batches = [(filled(i + 1), torch.ones(1 + 50 * i)) for i in range(BATCHES)]
    plan = prefetch_plan([], [PipelineTask("use", lambda ctx: None)], device=DEVICE, depth=2)
    pool = pool_of(plan)
    kept: list[Any] = []
    with SWPipeline(plan, device=DEVICE) as pipe:
        for turn in range(4):
            if serial:
                contexts = [pipe.run_one_serial_iter(batch) for batch in batches]
            else:
                contexts = list(pipe.iterate(batches))
            kept = [ctx.batch[0] for ctx in contexts]
            assert_same([[x] for x in kept], [[x.to(DEVICE)] for x, _ in batches])
            if turn:
                addresses |= {one.memory.data_ptr() for one in pool._used}
            assert len(pool._used) <= plan.depth == 3
    assert len(addresses) <= 3


class PartlyThere(Movable):
    """A batch on the device, with its lengths on the host, that cannot be pinned."""

    def pin_memory(self) -> PartlyThere:
        """Raise torch's error for a tensor on a device."""
        raise RuntimeError("only dense CPU tensors can be pinned")


def test_an_object_with_a_part_on_the_device_is_not_pinned() -> None:
    """Its ``to`` moves the rest; a task that reads it waits for the part on the device."""
    batches = [PartlyThere(filled(i).to(DEVICE), torch.tensor([i])) for i in range(3)]
    assert all(map(resolve(DEVICE).holds_work, batches))
    assert not resolve(DEVICE).holds_work(Movable(filled(0), torch.tensor([0])))
    plan = prefetch_plan([], [PipelineTask("use", lambda ctx: None)], device=DEVICE)
    with SWPipeline(plan, device=DEVICE) as pipe:
        found = [ctx.batch.x for ctx in pipe.iterate(batches)]
    assert_same([[x] for x in found], [[one.x] for one in batches])


# ------------------------------------------------------------------------------------- the loop


class Numbers(Dataset[Tensor]):
    """A dataset of different rows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def fed(kind: str) -> Any:
    """Return batches in pinned or in pageable memory."""
    if kind == "workers":
        return DataLoader(Numbers(), batch_size=2, num_workers=1, pin_memory=True)
    rows = [filled(i) for i in range(4)]
    return [one.pin_memory() for one in rows] if kind == "pinned" else rows


def groups(loop: Any) -> set[str | None]:
    """Return the thread groups of the loader and the tasks."""
    plan = loop.overlap.plan
    return {plan.pull_group, *plan.thread_groups}


def test_what_only_launches_copies_takes_no_thread() -> None:
    """Such batches are pinned already; to fill pinned memory takes a thread."""

    @swpipe.task(pure=True)
    def decode(ctx: IterContext) -> None:
        ctx.x = ctx.batch + 1

    def of(loader: Any, *tasks: Any, **options: Any) -> set[str | None]:
        with swpipe.overlap(loader, [*tasks, adding_up()], device=DEVICE, **options) as loop:
            return groups(loop)

    alone = {None, "default"}
    assert of(fed("pinned")) == of(fed("workers")) == alone
    assert groups(swpipe.ahead(fed("workers"), device=DEVICE)) == alone
    others = {"default", "loader", "io"}
    assert of(fed("pageable")) == of(fed("pinned"), decode) == others
    assert of((x for x in fed("pinned")), pull_ahead=True) == others
    assert of(fed("pinned"), workers=2) == others
    with pytest.raises(ValueError, match="workers is 0"):
        of(fed("pinned"), workers=0)


def test_without_a_thread_copies_run_while_the_caller_computes() -> None:
    """The next batch arrives while the first step is held."""
    backend.clear_log()
    gates: list[backend.Gate] = []

    def hold(ctx: IterContext) -> None:
        if not gates:
            gates.append(backend.gate())

    with swpipe.overlap(fed("pinned"), [hold, adding_up()], device=DEVICE) as loop:
        for ctx in loop:
            await_copies(2)
            gates[0].open()
            assert ctx.sum.item() == ROWS * ctx.iter_idx


@pytest.mark.parametrize("batches", ["pinned", "workers"])
def test_without_a_thread_a_pass_is_left_saved_and_gone_on_with(batches: str) -> None:
    """Each pass trains on the plain loop's batches."""
    plainly = [batch.sum().item() for batch in fed(batches)]
    with swpipe.overlap(fed(batches), [adding_up()], device=DEVICE) as loop:
        assert [ctx.sum.item() for ctx in loop] == plainly
        for ctx in loop:
            assert ctx.sum.item() == plainly[0]
            break
        assert [ctx.sum.item() for ctx in loop] == plainly
        steps = iter(loop)
        found = [next(steps).sum.item()]
        saved = loop.state_dict()
    with swpipe.overlap(fed(batches), [adding_up()], device=DEVICE) as loop:
        loop.load_state_dict(saved)
        assert [*found, *(ctx.sum.item() for ctx in loop)] == plainly
    assert [x.sum().item() for x in swpipe.ahead(fed(batches), device=DEVICE)] == plainly


def test_without_a_thread_an_error_comes_in_its_turn() -> None:
    """The copy's error is raised when the previous steps are done."""

    class Unmovable:
        def to(self, device: torch.device) -> None:
            raise RuntimeError("no way")

    batches = [filled(1).pin_memory(), filled(2).pin_memory(), Unmovable()]
    done = []
    with swpipe.overlap(batches, [adding_up()], device=DEVICE) as loop:
        assert groups(loop) == {None, "default"}
        with pytest.raises(RuntimeError, match="no way"):
            done.extend(ctx.sum.item() for ctx in loop)
    assert done == [ROWS, 2 * ROWS]


def await_copies(count: int) -> None:
    """Wait until ``count`` batches have been copied, whatever the caller's stream does."""
    until = time.monotonic() + DEADLINE_S
    while sum(work.name == "copy_" for work in backend.log()) < count:
        assert time.monotonic() < until
        time.sleep(1e-3)


@pytest.mark.parametrize("placed", [False, True], ids=["device=", "after decode"])
def test_copies_run_while_the_caller_computes(placed: bool) -> None:
    """Later batches arrive while the first step is held; its tasks before the copy do not wait."""
    backend.clear_log()
    gates: list[backend.Gate] = []

    @swpipe.task(pure=True)
    def decode(ctx: IterContext) -> None:
        ctx.x = ctx.batch * 1.0

    @swpipe.task(pure=True)
    def augment(ctx: IterContext) -> None:
        ctx.x = ctx.x + 1

    def train(ctx: IterContext) -> None:
        assert ctx.x.device.type == DEVICE.type
        if not gates:
            gates.append(backend.gate())
        ctx.sum = ctx.x.sum()

    tasks = [decode, copy_task(DEVICE, "x"), augment, train] if placed else [decode, augment, train]
    options: dict[str, Any] = {} if placed else {"device": DEVICE}
    sums = []
    with swpipe.overlap([filled(i) for i in range(6)], tasks, **options) as loop:
        streams = {name: entry.stream for name, entry in loop.overlap.plan.schedule.items()}
        for ctx in loop:
            await_copies(3)
            gates[0].open()
            sums.append(ctx.sum)
    assert streams == {
        "decode": "copy" if placed else "ahead",
        "copy": "copy",
        "augment": "ahead",
        "train": None,
    }
    assert [one.item() for one in sums] == [ROWS * (i + 1.0) for i in range(6)]


class Broken:
    """An object that cannot be moved."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """Raise an error, or return None."""
        if self.answer:
            raise self.answer
        return None


@pytest.mark.parametrize("answer", [OSError("no room"), None])
def test_an_object_that_cannot_be_moved(answer: Any, slow: None) -> None:
    """The error of its ``to`` is raised after the previous batches; the next pass is complete."""
    data: list[Any] = [filled(0), filled(1), (filled(2), Broken(answer)), filled(3)]
    done: list[int] = []

    def train(ctx: IterContext) -> None:
        done.append(ctx.iter_idx)

    loop = swpipe.overlap(data, [train], device=DEVICE)
    with loop:
        with pytest.raises((OSError, TypeError)) as told:
            for _ in loop:
                pass
        assert done == [0, 1]
        assert "no room" in str(told.value) or "Broken.to() or pin_memory() ret" in str(told.value)
        notes = "\n".join(told.value.__notes__)
        assert "the copy of a Broken to sim:0" in notes
        assert "task 'copy', iteration 2" in notes
        data[2] = filled(2)
        assert [float(ctx.batch[0]) for ctx in loop] == [0.0, 1.0, 2.0, 3.0]


def test_a_pass_may_be_left_and_closed_in_the_middle_of_copies() -> None:
    """No part of it reaches a later pass."""
    with backend.misbehaving(link_us_per_mib=10 * LINK, poison=True):
        data = [filled(i) for i in range(8)]
        for _ in range(2):
            with swpipe.overlap(data, [adding_up()], device=DEVICE) as loop:
                for _ in range(3):
                    for ctx in loop:
                        if ctx.iter_idx % 4 == 2:
                            break
                assert [float(ctx.sum) for ctx in loop] == [ROWS * float(i) for i in range(8)]
                next(iter(loop))


def adding_up() -> PipelineTask:
    """Return a task that sums the batch."""

    def add_up(ctx: IterContext) -> None:
        ctx.sum = ctx.batch.sum()

    return PipelineTask("add up", add_up)


def test_an_evaluation_on_another_device_within_the_loop(slow: None) -> None:
    """Each loop copies to its own device; the caller's device stays current."""
    data = [filled(i) for i in range(5)]
    with (
        swpipe.overlap(data, [adding_up()], device="sim:0") as loop,
        swpipe.overlap(data, [adding_up()], device=torch.device("sim", 1)) as evaluation,
    ):
        for ctx in loop:
            assert ctx.batch.device == torch.device("sim:0")
            if ctx.iter_idx == 2:
                sums = [(each.sum.device.index, float(each.sum)) for each in evaluation]
    assert sums == [(1, ROWS * float(i)) for i in range(5)]
    assert torch.accelerator.current_device_index() == 0


def test_a_loader_in_turn_is_copied_in_turn(slow: None) -> None:
    """The values are equal; nothing is ahead."""
    data = [filled(i) for i in range(5)]
    with swpipe.overlap(data, [adding_up()], device=DEVICE, pull_ahead=False) as loop:
        assert [float(ctx.sum) for ctx in loop] == [ROWS * float(i) for i in range(5)]
        assert loop.overlap.plan.depth == 1
        assert "'add up': of what they touch nothing is said" in str(loop.overlap)


@pytest.mark.parametrize("within", [False, True], ids=["a tensor", "an object with to"])
def test_a_batch_that_the_body_modifies_on_the_host_is_told(within: bool) -> None:
    """A plain loop would copy it later; the error names the argument."""
    data = [filled(i) for i in range(6)]
    batches = [Movable(x, x[:1]) for x in data] if within else data
    backend.clear_log()

    def spoil(ctx: IterContext) -> None:
        await_copies(3)
        data[ctx.iter_idx + 1].add_(1)

    with (
        swpipe.overlap(batches, [spoil], device=DEVICE) as loop,
        pytest.raises(PlanError, match=r"modified in place.*'copy' had run.*leave out device="),
    ):
        for _ in loop:
            pass


def test_a_task_that_is_called_copy_is_refused() -> None:
    """It is likely to copy the batch once more."""
    tasks = [PipelineTask("copy", lambda ctx: None), adding_up()]
    for make in (
        lambda: swpipe.overlap([1], tasks, device=DEVICE),
        lambda: prefetch_plan(tasks[:1], tasks[1:], device=DEVICE),
    ):
        with pytest.raises(PlanError, match="'copy' is among the tasks.*rename it"):
            make()


def test_a_recording_sees_a_pure_task() -> None:
    """Its buffers are no state: no other code uses them, and a profile must not restore them."""
    tasks = [copy_task(DEVICE), adding_up()]
    recording = record(tasks, filled(1), device=DEVICE)
    assert recording.plan().deps == (("add up", "copy"),)
    assert "'copy'" not in str(recording.report()).partition("notes:")[2]
    with swpipe.overlap([filled(1)] * 20, tasks, device=None, check_effects=True) as loop:
        assert [float(ctx.sum) for ctx in loop] == [float(ROWS)] * 20


def test_the_profiler_and_a_trace_know_the_copy(slow: None) -> None:
    """It is like any other task: it has an exposed time, a shortcut, spans on its stream."""
    data = [filled(i) for i in range(4)]
    plan = prefetch_plan([], [adding_up()], device=DEVICE)
    with SWPipeline(plan, device=DEVICE) as pipe:
        with pipe.trace() as trace:
            pipe.run(data)
        assert any(s.task == "copy" and s.row.kind == "stream" for s in trace.spans)
        result = TaskProfiler(pipe).profile(data[1], 1, 2, 2)
        assert result.exposed_s.keys() == {"copy", "add up"}
        with pipe.shortcut("copy"):
            sums = [float(ctx.sum) for ctx in pipe.iterate([filled(3)] * 3)]
    assert sums == [ROWS * 3.0] * 3

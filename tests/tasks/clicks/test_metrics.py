"""The running AUC, and the guard against losses that are no numbers."""

from __future__ import annotations

import math

import pytest
import torch

from swpipe.tasks.clicks._torchrec import BinaryAUROC
from swpipe.tasks.clicks.metrics import LossGuard, RunningAUC, TrainingDivergedError

CPU = torch.device("cpu")


def scores(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that say something about their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=generator) < 0.3).float()
    return torch.randn(rows, generator=generator) + labels, labels


def test_running_auc_is_the_auc() -> None:
    """Over several batches it agrees with torchmetrics' exact one, but for ties within bins."""
    running, exact = RunningAUC(CPU), BinaryAUROC(thresholds=None)
    for seed in range(4):
        logits, labels = scores(500, seed)
        running.update(logits, labels)
        exact.update(logits.sigmoid(), labels.long())
    assert running.compute() == pytest.approx(float(exact.compute()), abs=5e-4)


@pytest.mark.parametrize(
    ("logits", "labels", "auc"),
    [
        ([-2.0, -1.0, 1.0, 2.0], [0, 0, 1, 1], 1.0),
        ([-2.0, -1.0, 1.0, 2.0], [1, 1, 0, 0], 0.0),
        ([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1], 0.5),
        ([-100.0, 100.0, 0.0], [0, 1, 1], 1.0),
    ],
)
def test_running_auc_of_plain_cases(logits: list[float], labels: list[int], auc: float) -> None:
    """All right, all wrong, all ties, and probabilities of 0 and 1."""
    running = RunningAUC(CPU)
    running.update(torch.tensor(logits), torch.tensor(labels, dtype=torch.float32))
    assert running.compute() == auc


def test_running_auc_needs_both_labels() -> None:
    """With one kind of row only there is no such area."""
    running = RunningAUC(CPU)
    assert math.isnan(running.compute())
    running.update(torch.zeros(3), torch.zeros(3))
    assert math.isnan(running.compute())


def test_running_auc_takes_empty_batches_and_bad_logits() -> None:
    """Neither breaks it: the guard is there to tell of the latter."""
    running = RunningAUC(CPU)
    running.update(torch.zeros(0), torch.zeros(0))
    running.update(torch.tensor([math.nan, math.inf]), torch.tensor([0.0, 1.0]))
    assert int(running.counts.sum()) == 2


def test_an_update_leaves_the_old_counts_alone() -> None:
    """What a shortcut has kept must not change under its hands."""
    running = RunningAUC(CPU)
    kept = running.counts
    running.update(*scores(100))
    assert int(kept.sum()) == 0
    assert int(running.counts.sum()) == 100


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_at_its_step(loss: float) -> None:
    """The error names the step."""
    guard = LossGuard(CPU)
    guard.watch(torch.tensor(0.5), 6)
    with pytest.raises(TrainingDivergedError, match="at step 7") as caught:
        guard.watch(torch.tensor(loss), 7)
    assert caught.value.step == 7


def test_elsewhere_the_host_looks_now_and_then_and_still_names_the_first_step() -> None:
    """Between looks nothing is asked of the device; the look finds the first bad step."""
    guard = LossGuard(CPU, interval=5)
    guard.interval = 5  # as on a device other than the CPU
    for step, loss in enumerate([0.5, math.nan, 0.5, math.inf]):
        guard.watch(torch.tensor(loss), step)
    with pytest.raises(TrainingDivergedError) as caught:
        guard.watch(torch.tensor(0.5), 4)
    assert caught.value.step == 1


def test_the_last_steps_are_checked_when_asked() -> None:
    """What came after the last look is not overlooked."""
    guard = LossGuard(CPU)
    guard.interval = 100
    guard.check()
    guard.watch(torch.tensor(math.nan), 3)
    with pytest.raises(TrainingDivergedError, match="at step 3"):
        guard.check()


def test_only_the_cpu_is_asked_at_every_step() -> None:
    """On other devices each look makes the host wait."""
    assert LossGuard(CPU).interval == 1
    assert LossGuard(torch.device("meta")).interval == 100

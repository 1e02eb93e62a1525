"""Train the click model under two plans, and compare their speed and their numbers.

python train_clicks.py [--data LOG.tsv] [--batch-size N] [--seed N] [--device DEVICE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
from click_job import PLANS, ClickJob, log_in
from click_log import Lines, batches_of
from torch import Tensor

from swpipe import SWPipeline


class Trained(NamedTuple):
    """The result of training under one plan.

    Attributes:
        losses: The loss of each step.
        parameters: The parameters after the last step.
        malformed: The number of rows that were dropped.
        seconds: The time that it took.
    """

    losses: list[Tensor]
    parameters: list[Tensor]
    malformed: int
    seconds: float


def train(plan: str, batches: list[Lines], seed: int = 0, device: str = "cpu") -> Trained:
    """Train a new model on all batches under one of the plans."""
    job = ClickJob(seed, device)
    losses: list[Tensor] = []
    malformed = 0
    with SWPipeline(PLANS[plan](), job.tasks(), device=device) as pipe:
        begin = time.perf_counter()
        for ctx in pipe.iterate(batches):
            losses.append(ctx.loss.detach())
            malformed += ctx.malformed
        pipe.device.synchronize()
        seconds = time.perf_counter() - begin
    return Trained(losses, [*job.model.parameters()], malformed, seconds)


def main() -> None:
    """Compare the plans on the log that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a log; by default one is generated")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the feed uses the other core
    batches = batches_of(given.data or log_in(Path("build/clicks")), given.batch_size)
    train("serial", batches[:8], given.seed, given.device)  # the first steps load and allocate
    results = {name: train(name, batches, given.seed, given.device) for name in PLANS}
    for name, result in results.items():
        speed = len(result.losses) / result.seconds
        ends = f"{result.losses[0].item():.4f} to {result.losses[-1].item():.4f}"
        print(f"{name:10} {speed:7.1f} steps/s   loss {ends}   {result.malformed} rows dropped")
    serial, pipelined = results.values()
    ours = [*pipelined.losses, *pipelined.parameters]
    equal = all(map(torch.equal, [*serial.losses, *serial.parameters], ours))
    print("losses and parameters are", "bit-equal" if equal else "DIFFERENT")
    print(f"{serial.seconds / pipelined.seconds:.2f} times as many steps per second")


if __name__ == "__main__":
    main()

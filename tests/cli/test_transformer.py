"""``swpipe train --workload transformer``: the ranks train the parameters of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swpipe.plans.pipeline_parallel import torch_schedule
from tests.cli.test_cli import out, refused
from tests.cli.test_launched import on_two_ranks
from tests.support.scripts import Script, Scripts

# On another torch there is nothing to run.
pytest.importorskip("swpipe.tasks.pipeline_parallel.torch_pipelining", exc_type=ImportError)

SMALL = (
    "train", "--workload", "transformer", "--layers", 4, "--hidden-size", 8, "--heads", 2,
    "--sequence-length", 4, "--global-batch-size", 8, "--microbatches", 4, "--steps", 3,
)  # fmt: skip

QUICKLY = (
    "import swpipe.tasks.pipeline_parallel.gpt_job as job; job.EFFORT = 0.02; "
    "from swpipe.cli import main; main()"
)


def digests(printed: str) -> list[str]:
    """Of the parameters of each run."""
    return re.findall(r" ([0-9a-f]{16})$", printed, re.MULTILINE)


def test_two_ranks_train_the_parameters_of_one_process(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whichever schedule they run, and under both plans."""
    (alone,) = digests(out(capsys, *SMALL))
    file = tmp_path / "mine.csv"
    file.write_text(torch_schedule("interleaved", 2, 4).to_csv())
    for schedule, plan in (("ours", "ahead"), ("dualpipev", "ahead"), (file, "serial")):
        done = on_two_ranks(scripts, *SMALL, "--schedule", schedule, "--plan", plan, code=QUICKLY)
        assert done.codes == {}, done.err
        assert digests(done.out) == [alone]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ("--schedule", "dualpipev", "--microbatches", 2),
            "--schedule dualpipev: torch's ScheduleDualPipeV on 2 ranks needs at least 4 mic",
        ),
        (("--layers", 3, "--schedule", "zbv"), "the model has 3 layers, and the schedule 4 stages"),
    ],
)
def test_a_mistake_is_told_once(scripts: Scripts, args: tuple[object, ...], told: str) -> None:
    """In one line, by rank 0; all ranks end with exit code 2."""
    done = on_two_ranks(scripts, *SMALL, *args)
    assert len(done.told) == 1, done.err
    assert told in done.told[0]
    assert "Traceback" not in done.err
    assert done.codes == {0: 2, 1: 2}


def test_a_step_that_cannot_be_cut_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With what would do."""
    told = refused(capsys, *SMALL, "--microbatches", 3)
    assert "8 sequences per step, which 3 microbatches do not divide: " in told


def test_a_file_for_other_ranks_is_refused(scripts: Scripts, tmp_path: Path) -> None:
    """In one line, on all ranks."""
    file = tmp_path / "mine.csv"
    file.write_text(torch_schedule("zbv", 3, 4).to_csv())
    done = on_two_ranks(scripts, *SMALL, "--schedule", file)
    (line,) = done.told
    assert "ranks is 3 in the schedule, 2 in the job" in line
    assert done.codes == {0: 2, 1: 2}


ANOTHER = "import torch; torch.__version__ = '2.12.0'; from swpipe.cli import main; main()"


def test_another_torch_is_refused(scripts: Scripts) -> None:
    """In one line, before anything runs."""
    done = scripts.run(Script(ANOTHER, args=[*map(str, SMALL)]))
    assert done.returncode == 2
    assert done.stderr.startswith("swpipe: torch 2.12.0 is installed, but swpipe.tasks.pipeline_")
    assert done.stderr.count("\n") == 1

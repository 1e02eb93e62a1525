"""The command line under torchrun: rank 0 prints results, and each rank its own mistakes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from swpipe import PipelinePlan, TaskProfiler
from swpipe._distributed.agreement import Facts, differences
from swpipe.cli import launched as ranks
from swpipe.cli.user_errors import UserError
from swpipe.cli.user_inputs import save
from swpipe.trace import Trace
from tests.cli.test_cli import PLANS, out, refused
from tests.support.scripts import Script, Scripts, as_torchrun
from tests.support.servers import ROOT


class Done(NamedTuple):
    """The result of a job.

    Attributes:
        out: The standard output.
        err: The standard error.
        codes: Exit codes, by rank; empty where all went well.
    """

    out: str
    err: str
    codes: dict[int, int]

    @property
    def told(self) -> list[str]:
        """The lines of swpipe on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("swpipe: ")]


LOOP = """
import time
import torch
import torch.distributed as dist
from swpipe import PipelineTask


def load(ctx):
    ctx.x = ctx.batch + dist.get_rank()


def reduce(ctx):
    dist.all_reduce(ctx.x)
    ctx.loss = ctx.x.sum()


def loop(reduce=reduce):
    tasks = [PipelineTask("load", load, pure=True), PipelineTask("reduce", reduce)]
    return tasks, [torch.full((4,), float(n)) for n in range(9)]


def half():
    return loop() if dist.get_rank() == 0 else 3


def failing():
    def fail(ctx):
        if dist.get_rank() == 1 and ctx.iter_idx == 3:
            print("BEGIN", time.time(), flush=True, file=__import__("sys").__stdout__)
            raise ZeroDivisionError("planted on rank one")
        reduce(ctx)
    return loop(fail)
"""
"""Loops of a user whose tasks communicate: one is wrong on a rank, and one fails."""

OWN = ("--device", "cpu", "--workload")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the module of the loops."""
    (tmp_path / "my_ranked_loop.py").write_text(LOOP)
    return tmp_path


MAIN = "from swpipe.cli import main; main()"

QUICK = "a.EFFORT, a._ROUNDS, a._WINDOWS, a._BATCHES = 0.1, 2, 1, 1"
QUICKLY = f"import swpipe.tuning.autotuning as a; {QUICK}; {MAIN}"
"""Settings of short searches and trials; this module is about ranks only."""


def on_two_ranks(scripts: Scripts, *args: object, code: str = MAIN, folder: Path = ROOT) -> Done:
    """Run the command line on two ranks, with the variables that torchrun sets."""
    one = Script(code, args=[*map(str, args)], folder=str(folder))
    ranks = [replace(one, environment=told) for told in as_torchrun(2)]
    ended = scripts.run_together(ranks)
    codes = {rank: one.returncode for rank, one in enumerate(ended) if one.returncode}
    return Done("".join(one.stdout for one in ended), "".join(one.stderr for one in ended), codes)


@pytest.mark.slow
def test_two_ranks_train_bit_equal(scripts: Scripts, here: Path) -> None:
    """One bar, one table and one timeline are printed: those of rank 0."""
    args = (*OWN, "my_ranked_loop:loop", "--compare", "serial,serial", "--timeline", "t.json")
    done = on_two_ranks(scripts, "train", *args, folder=here)
    assert done.codes == {}, done.err
    assert done.out.count("serial and serial: bit-equal: 9 losses") == 1
    assert done.out.count("steps/s") == 1
    assert done.err.count("training: 100%") == 1  # of one rank alone
    assert {span.task for span in Trace.load(here / "t.json").spans} >= {"load", "reduce"}


def test_two_ranks_make_one_plan(scripts: Scripts, here: Path) -> None:
    """Both measure, and train under the same plan; rank 0 says how it was made."""
    args = (*OWN, "my_ranked_loop:loop", "--compare", "serial,auto")
    done = on_two_ranks(scripts, "train", *args, code=QUICKLY, folder=here)
    assert done.codes == {}, done.err
    assert done.out.count("serial and auto: bit-equal: 9 losses") == 1
    assert re.findall(
        r"^(?:auto: )?[\d.]+ ms per iteration, \d+ iterations? in flight", done.out, re.MULTILINE
    )
    assert "auto: expected " in done.out
    told = "my_ranked_loop:loop: recording what the tasks touch"
    assert done.err.splitlines().count(told) == 1


@pytest.mark.slow
def test_a_mistake_that_one_rank_finds_is_its_line(scripts: Scripts, here: Path) -> None:
    """The loop is wrong on rank 1, which ends with 2; rank 0 fails in its first collective."""
    done = on_two_ranks(scripts, "train", *OWN, "my_ranked_loop:half", folder=here)
    (told,) = done.told
    assert told.startswith(
        "swpipe: rank 1 of 2: workload my_ranked_loop:half: the function returned 3"
    )
    assert done.codes == {0: 1, 1: 2}


APART = """
import os, sys
from swpipe.cli import main
*told, folder = sys.argv[1:]
main([*told, "--plan", f"{folder}/plan{os.environ['RANK']}.toml"])
"""


@pytest.mark.slow
def test_ranks_with_different_plan_files_are_told_so(scripts: Scripts, here: Path) -> None:
    """Each prints a line with what differs and where; no batch is read."""
    plan = PipelinePlan.serial(["load", "reduce"])
    plan.save(here / "plan0.toml")
    replace(plan, pipeline_depth=plan.depth + 1).save(here / "plan1.toml")
    args = (*OWN, "my_ranked_loop:loop", here)
    done = on_two_ranks(scripts, "train", *args, code=APART, folder=here)
    assert len(done.told) == 2
    for rank, told in enumerate(sorted(done.told)):
        begin = f"swpipe: rank {rank} of 2: the ranks were given different commands: plan 1, digest"
        assert told.startswith(begin)
        depths = f"{plan.depth} on rank 0, {plan.depth + 1} on rank 1"
        assert f"; plan 1, pipeline_depth: {depths}. Start all" in told
        assert told.endswith("with the same command, and with the same plan files on every node")
    assert "Traceback" not in done.err
    assert done.codes == {0: 2, 1: 2}


def test_ranks_have_to_be_told_the_same_command() -> None:
    """Options and plans are compared; the paths of files on a node are not."""
    plan = PLANS["serial"]()

    def facts(**params: object) -> Facts:
        return ranks.command_facts("train", params, [plan])

    same = facts(steps=6, data=[Path("here")]), facts(steps=6, data=[Path("there")])
    assert differences(same) == ""
    apart = facts(steps=6, held_out=[Path("here")]), facts(steps=7, held_out=None)
    assert differences(apart) == (
        "--steps: 6 on rank 0, 7 on rank 1; --held-out: 1 files on rank 0, none on rank 1"
    )
    planned = ranks.command_facts("train", {}, [None]), ranks.command_facts("train", {}, [plan])
    assert "plan 1, digest: yet to be made on rank 0, " in differences(planned)


def test_a_rank_with_another_command_is_refused() -> None:
    """Each rank refuses when it knows the others' commands."""
    store = dist.HashStore()
    store.set(ranks._COMMAND.format(1), json.dumps({"--steps": "7"}))
    rank = ranks.Rank.__new__(ranks.Rank)
    rank.number, rank.size, rank._store = 0, 2, store
    rank.agree({"--steps": "7"})
    store.set(f"{ranks._COMMAND.format(1)}/read", "")
    with pytest.raises(UserError, match="different commands: --steps: 6 on rank 0, 7 on rank 1"):
        rank.agree({"--steps": "6"})


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have ended with an error before, for example."""
    monkeypatch.setattr(ranks, "JOIN_S", 0.01)
    rank = ranks.Rank.__new__(ranks.Rank)
    rank.number, rank.size, rank._store = 0, 2, dist.HashStore()
    with pytest.raises(UserError, match="rank 1 began no command within 0.01 s: see the errors"):
        rank.agree({"--steps": "7"})


FAILING = f"import atexit; atexit.register(print, 'TORN DOWN'); {MAIN}"


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_with_its_own_error(scripts: Scripts, here: Path) -> None:
    """It ends within seconds, with its task and iteration."""
    args = ("train", *OWN, "my_ranked_loop:failing")
    done = on_two_ranks(scripts, *args, code=FAILING, folder=here)
    began_s = float(done.out.split("BEGIN")[1].split()[0])
    assert time.time() - began_s < 60.0  # gloo's own time-out is half an hour
    assert done.codes[1] == 1
    assert "TORN DOWN" not in done.out  # where gloo, with a collective pending, may abort: -6
    assert "ZeroDivisionError: planted on rank one" in done.err
    assert "at task 'reduce', iteration 3, thread group 'default'" in done.err


LEFT = """
import os, sys
import torch.distributed as dist
from swpipe.cli.launched import run_on_ranks

stores = [dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)]
os.environ["MASTER_PORT"] = str(stores[0].port)
def fail(job):
    stores.clear()
    print("LAST", file=sys.__stdout__)  # and not flushed
    raise ZeroDivisionError("planted on rank one")

run_on_ranks(fail)
"""


def test_a_rank_that_raises_ends_at_once_where_the_store_is_gone(scripts: Scripts) -> None:
    """The store is gone if rank 0 held it, and has failed before."""
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    rank = scripts.run(Script(LEFT, environment=told), deadline_s=90)
    assert (rank.returncode, rank.stdout) == (1, "LAST\n")
    assert "ZeroDivisionError: planted on rank one" in rank.stderr


# ------------------------------------------------- one rank, in this very process


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set torchrun's variables for a single rank; a rank that fails ends in SystemExit."""
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    told["TORCHELASTIC_RUN_ID"] = "here"
    for name, value in {**told, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)


@pytest.mark.usefixtures("one_rank")
def test_a_breakdown_is_of_every_task(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the user's own tasks; the process group is gone afterwards."""
    quick = partialmethod(TaskProfiler.profile_loop, num_warmup=1, num_measure=1)
    monkeypatch.setattr(TaskProfiler, "profile_loop", quick)
    monkeypatch.syspath_prepend(str(here))
    figures = here / "out" / "figures.json"
    args = (*OWN, "my_ranked_loop:loop", "--rounds", 2, "--output", figures)
    printed = out(capsys, "profile", *args)
    for task in ("load", "reduce"):
        assert len(re.findall(rf"^{task} ", printed, re.MULTILINE)) == 1
    assert figures.exists()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("one_rank")
def test_plans_are_inferred_and_checked_on_ranks(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They belong to tasks of the user that communicate."""
    monkeypatch.syspath_prepend(str(here))
    plan = here / "plan.toml"
    args = (*OWN, "my_ranked_loop:loop")
    out(capsys, "plan", "infer", *args, "--output", plan)
    assert tuple(PipelinePlan.load(plan).schedule) == ("load", "reduce")
    assert PipelinePlan.load(plan).schedule["reduce"].globally_ordered
    assert "orders are kept in every interleaving" in out(capsys, "plan", "check", plan, *args)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("one_rank")
def test_ranks_have_to_be_told_the_same_planning_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is checked first: a rank that measured alone would wait for the others."""
    told: list[Facts] = []
    monkeypatch.setattr(ranks.Rank, "agree", lambda _, facts: told.append(facts))
    PipelinePlan.serial(["a"]).save(tmp_path / "here.toml")
    first = refused(capsys, "plan", "auto", tmp_path / "here.toml", "--groups", 2)
    assert first.startswith("swpipe: rank 0 of 1: plan ")
    args = ("plan", "simulate", tmp_path / "here.toml", "--costs", "no_costs.json")
    assert refused(capsys, *args).startswith("swpipe: rank 0 of 1: costs no_costs.json: ")
    said = differences(told)
    assert said.startswith("command: swpipe plan auto on rank 0, swpipe plan simulate on rank 1; ")
    assert "--costs: none on rank 0, 1 files on rank 1" in said
    assert "--groups: 2 on rank 0, none on rank 1" in said


@pytest.mark.usefixtures("one_rank")
def test_only_rank_0_writes_files(tmp_path: Path) -> None:
    """All ranks have the same to write, possibly to one path."""
    first, second = ranks.Rank(), ranks.Rank()
    second.number = 1
    written: list[Path] = []
    for rank in (None, first, second):
        context: Any = SimpleNamespace(obj=rank)
        save(context, "written to", tmp_path / "plan.toml", written.append)
        save(context, "written to", None, written.append)
    assert written == [tmp_path / "plan.toml"] * 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("demo",), "demo runs in one process: under torchrun there are train"),
        (("plan", "show", "gone.toml"), "plan gone.toml: No such file"),
        (("train", "--no-such"), "No such option: --no-such"),
        (("profile", *OWN, "gone:loop"), "workload gone:loop: No module named 'gone'"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], told: str
) -> None:
    """The line names the rank; the exit code is 2."""
    assert refused(capsys, *args).startswith(f"swpipe: rank 0 of 1: {told}")
    if dist.is_initialized():  # it would have ended with the process
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_device_is_each_ranks_own() -> None:
    """A device that the user names belongs to one rank only."""
    with pytest.raises(UserError, match="each rank takes a device of its own; give --device cuda"):
        ranks.Rank().join("cuda:1")


@pytest.mark.usefixtures("one_rank")
def test_ranks_are_known_by_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its variables are needed; without a rank, for example, this is one process."""
    assert ranks.launched()
    monkeypatch.delenv("RANK")
    assert not ranks.launched()

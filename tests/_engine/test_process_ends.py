"""A process ends cleanly: a forked child, and an interpreter that exits while workers are busy."""

from __future__ import annotations

from tests.support.scripts import Script, Scripts


def test_a_forked_child_is_refused_and_ends_and_the_parent_goes_on(scripts: Scripts) -> None:
    """Iterations are in flight in the parent; ``fork_trials`` has each way."""
    trials = Script(module="tests._engine.fork_trials", errors=("Warning",))
    assert scripts.run(trials) == (0, "done\n", "")


BUSY = """
import os, signal, sys, threading, torch
import swpipe._engine.process
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

swpipe._engine.process.EXIT_GRACE_S = 0.1
swpipe._engine.process._UNWIND_S = 60.0 if WORKER == "loops" else 0.1  # the others do not end
torch.set_num_threads(1)
inside = threading.Event()
plan = PipelinePlan({"busy": TaskSchedule(0, None, "io"), "end": TaskSchedule(1)})
x = torch.rand(100, 100)
large = torch.rand(1000, 1000)

def loops():
    while True:
        torch.mm(x, x)

def computes():
    torch.linalg.matrix_power(large, 2 ** 62 - 1)

def returns():
    torch.linalg.matrix_power(large, 1023)

def waits():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def busy(ctx):
    inside.set()
    globals()[WORKER]()

tasks = [PipelineTask("busy", busy), PipelineTask("end", lambda ctx: None)]
pipe = SWPipeline(plan, tasks, device="cpu", check_effects=False)

def handler(signum, frame):
    pipe.close()
    raise SystemExit(5)

signal.signal(signal.SIGTERM, handler)
data = iter(range(9))
pipe.fill_pipeline(data)
inside.wait()
if ENDING == "exit":
    sys.exit(3)
if ENDING == "raise":
    raise ArithmeticError
if ENDING == "sigterm":
    os.kill(os.getpid(), signal.SIGTERM)
"""

CODES = {"end": 0, "exit": 3, "raise": 1, "sigterm": 5}
LEFT = (
    "swpipe: thread group 'io' is still inside task 'busy' of iteration 0; "
    "the interpreter exits without waiting for it\n"
)


ENDS = [
    *[("loops", "end"), ("computes", "exit"), ("returns", "end")],
    *[("waits", "raise"), ("waits", "sigterm")],
]
"""Pairs: what the worker does, and how the script ends."""


def test_a_script_keeps_its_exit_code_whatever_a_worker_does(scripts: Scripts) -> None:
    """The script does not wait for the worker, and names what could not be ended."""
    codes = [f"WORKER = {worker!r}\nENDING = {ending!r}\n{BUSY}" for worker, ending in ENDS]
    done = scripts.run_together([Script(code) for code in codes])
    for (worker, ending), (code, _, said) in zip(ENDS, done, strict=True):
        assert code == CODES[ending], said
        if worker != "returns":  # that one may or may not, while the interpreter exits
            assert (LEFT in said) == (worker != "loops"), said
        warned = f"RuntimeWarning: {LEFT.partition(';')[0]}; its thread"
        assert (warned in said) == (ending == "sigterm"), said

"""The setting of all tests: one intra-op thread, Ctrl-C, no thread left, shared ranks."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.support import budget, garbage, servers
from tests.support.ranks import Ranks
from tests.support.scripts import Scripts

if find_spec("hypothesis"):  # a GPU machine's own packages may lack it; its tests do without
    from hypothesis import HealthCheck, settings

    # Random plans run real threads: how long one example takes says nothing about its worth.
    settings.register_profile(
        "swpipe",
        deadline=None,
        derandomize=budget.SEED is None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("swpipe")

# Two cores are shared by the tests' own threads; and sums must not depend on how many help.
torch.set_num_threads(1)

# A shell has its background jobs ignore Ctrl-C, and tests send themselves one.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Nothing that is collected is garbage: see ``pytest_collection_finish``.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--accelerator``, which selects the kinds of device for ``tests/device``."""
    told = "run tests/device on CUDA, or else on the test backend, which the process sees forever"
    parser.addoption("--accelerator", action="store_true", help=told)


def pytest_configure() -> None:
    """Make the workers use the servers of scripts and ranks of the process that starts them."""
    servers.folder()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how to draw the same examples again, unless they are the fixed ones."""
    if budget.SEED is not None:
        drawn = f"SWPIPE_EXAMPLES_FACTOR={budget.FACTOR} SWPIPE_EXAMPLES_SEED={budget.SEED}"
        terminalreporter.write_line(f"random examples: {drawn}")


def pytest_sessionfinish() -> None:
    """Log how many examples this process has run."""
    budget.log()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores: ranks and stalls mostly wait."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """Exclude everything that was collected from garbage collection: it stays."""
    garbage.freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Exclude what a test has imported, too."""
    garbage.freeze_if_many()


GRACE_S = 20.0
"""The time in seconds that a thread has to end."""


def left_behind(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that began after ``before`` was taken and that a test must have ended.

    These are swpipe's own, and all that would keep the interpreter from ending. Other daemons
    (a progress bar's monitor, a library's pool) live as long as their owners like.
    """
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("swpipe-"))
    ]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread of its own running."""
    before = set(threading.enumerate())
    yield
    for thread in left_behind(before):
        thread.join(GRACE_S)
    if names := sorted(thread.name for thread in left_behind(before)):
        pytest.fail(f"the test left threads running: {', '.join(names)}", pytrace=False)


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """A single rank with a process group of its own."""
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks that all tests share, since starting them takes seconds."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks that all tests share."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def scripts() -> Scripts:
    """A runner of scripts in processes of their own that have torch and swpipe imported."""
    return Scripts("torch")


@pytest.fixture(scope="session")
def torchrec_scripts() -> Scripts:
    """The same, with TorchRec and the click job of several ranks imported, too."""
    return Scripts("torchrec")

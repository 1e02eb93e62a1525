"""What became of a case, told from its result and the traceback."""

from __future__ import annotations

import re
import unittest
from dataclasses import dataclass

from swpipe.tasks.sparse_dist._torchrec import torchrec_pipelines

PASSED = "passed"
NO_CACHE = "passed, tables without a GPU's cache"
REFUSED = "refused by design"
NEEDS_GPU = "cannot run on a CPU"
FAILED = "failed"
HUNG = "hung"
OTHER = "not about our pipelines"
KINDS = (PASSED, NO_CACHE, REFUSED, NEEDS_GPU, FAILED, HUNG, OTHER)

_THEIRS = torchrec_pipelines.TrainPipelineSparseDist  # before the tests see ours instead
_REFUSING = re.compile(r'File ".*swpipe/tasks/torchrec_pipelines/[^"]*", line \d+, in \w+$')
_PATCHED = re.compile(r"does not have the attribute '(\w+)'$")


@dataclass(frozen=True)
class Outcome:
    """One of ``KINDS``, why, and all that was printed."""

    kind: str
    why: str = ""
    text: str = ""


def told(result: unittest.TestResult, used: bytes) -> Outcome | None:
    """The outcome; None for arguments that the test itself excludes."""
    texts = [text for _, text in [*result.errors, *result.failures]]
    text = "\n".join(texts)
    ours = b"p" in used
    if "UnsatisfiedAssumption" in text:
        return None
    if result.skipped:
        return Outcome(NEEDS_GPU if "NCCL" in result.skipped[0][1] else OTHER, result.skipped[0][1])
    if not texts:
        if not ours:
            return Outcome(OTHER)
        return Outcome(NO_CACHE if b"c" in used else PASSED)
    why = _last_line(texts[0])
    if _is_refusal(texts[0], why):
        return Outcome(REFUSED, why, text)
    return Outcome(FAILED if ours else NEEDS_GPU, why, text)


def _last_line(text: str) -> str:
    """The line with the exception's type and message."""
    lines = [line.strip() for line in text.strip().splitlines()]
    raised = [line for line in lines if re.match(r"(?:\w+\.)*\w*(?:Error|Exception)\b", line)]
    return (raised or lines)[-1]


def _is_refusal(text: str, why: str) -> bool:
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    patched = _PATCHED.search(why)
    if patched is not None:
        return hasattr(_THEIRS, patched[1])  # the test replaces a private method
    return bool(frames) and bool(_REFUSING.search(frames[-1]))

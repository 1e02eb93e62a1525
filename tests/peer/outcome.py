"""The outcome of a case, derived from the texts of its errors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swpipe.tasks.torchrec._torchrec import torchrec_pipelines

PASSED = "passed"
NO_CACHE = "passed, with tables that have no cache, since a CPU has none"
REFUSED = "refused by design"
ALIKE = "fails with TorchRec's pipeline too, on a CPU"
NEEDS_GPU = "fails before a pipeline is made, on a CPU"
FAILED = "failed"
HUNG = "hung"
OTHER = "not about a pipeline"
KINDS = (PASSED, NO_CACHE, REFUSED, ALIKE, NEEDS_GPU, FAILED, HUNG, OTHER)
GOOD = (PASSED, NO_CACHE)

_THEIRS = torchrec_pipelines.TrainPipelineSparseDist  # before the tests see ours instead
_REFUSING = re.compile(
    r'File ".*tasks/torchrec/pipelines/(?:hooks|refused_arguments|named|semi_sync|staged)\.py", '
    r"line \d+, in \w+$"
)
_PATCHED = re.compile(r"does not have the attribute '(\w+)'$")
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b")


@dataclass(frozen=True)
class Outcome:
    """One of ``KINDS``, with the reason and the traceback."""

    kind: str
    why: str = ""
    text: str = ""


def told(result: tuple[list[str], list[str]], used: bytes) -> Outcome | None:
    """Return the outcome of errors and skips; None for arguments that the test itself excludes.

    ``used`` has a "p" if a pipeline was made, and a "c" if tables lost their cache.
    """
    errors, skipped = result
    made = b"p" in used
    if any("UnsatisfiedAssumption" in text for text in errors):
        return None
    if skipped:
        return Outcome(OTHER, skipped[0])
    if not errors:
        return Outcome(OTHER if not made else NO_CACHE if b"c" in used else PASSED)
    why = _last_line(errors[0])
    if _is_refusal(errors[0], why):
        return Outcome(REFUSED, why, errors[0])
    return Outcome(FAILED if made else NEEDS_GPU, why, errors[0])


def _last_line(text: str) -> str:
    """Return the line with the exception's type and message."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return ([line for line in lines if _RAISED.match(line)] or lines)[-1]


def _is_refusal(text: str, why: str) -> bool:
    """Return whether an error is a refusal, or the test replaces a private method of TorchRec."""
    if why.startswith("swpipe.tasks.torchrec.rewriting.inputs.RewriteError:"):
        return True  # the model cannot be pipelined
    if patched := _PATCHED.search(why):
        return hasattr(_THEIRS, patched[1])
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return bool(frames) and bool(_REFUSING.search(frames[-1]))

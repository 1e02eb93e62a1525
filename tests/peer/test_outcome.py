"""The outcomes that the runner of TorchRec's tests derives from results."""

from __future__ import annotations

import pytest

from tests.peer import outcome as kinds
from tests.peer.outcome import told

_ROOM = '  File "/x/swpipe/tasks/torchrec/'
_OURS = _ROOM + 'pipelines/refused_arguments.py", line 3, in refuse\n    raise\n'
_OTHER = _ROOM + 'rewriting/rewrite.py", line 3, in use\n    raise\n'
_REWRITE_ERROR = "swpipe.tasks.torchrec.rewriting.inputs.RewriteError"
_MOCK = "AttributeError: <class 'X'> does not have the attribute '{}'\n"


@pytest.mark.parametrize(
    ("errors", "used", "kind"),
    [
        ([], b"p", kinds.PASSED),
        ([], b"cp", kinds.NO_CACHE),
        ([], b"", kinds.OTHER),
        ([_OURS + "NotImplementedError: apply_jit\n"], b"p", kinds.REFUSED),
        ([_OURS + _OTHER + "ValueError: of another module\n"], b"p", kinds.FAILED),
        ([_OTHER + _MOCK.format("fill_pipeline")], b"p", kinds.REFUSED),
        ([_OTHER + _MOCK.format("of_the_test")], b"p", kinds.FAILED),
        (
            [_OTHER + "swpipe.tasks.torchrec.rewriting.inputs.RewriteError: why\n"],
            b"p",
            kinds.REFUSED,
        ),
        (["AssertionError: 1 != 2\n"], b"p", kinds.FAILED),
        (["RuntimeError: no CUDA\n"], b"", kinds.NEEDS_GPU),
    ],
)
def test_a_result_is_of_one_kind(errors: list[str], used: bytes, kind: str) -> None:
    """The kind depends on the last frame, and on whether a pipeline was made."""
    found = told((errors, []), used)
    assert found is not None
    assert found.kind == kind
    assert found.why == (errors[0].strip().splitlines()[-1] if errors else "")


def test_arguments_that_a_test_excludes_are_no_case() -> None:
    """Hypothesis calls this an unsatisfied assumption."""
    assert told((["hypothesis.errors.UnsatisfiedAssumption\n"], []), b"") is None

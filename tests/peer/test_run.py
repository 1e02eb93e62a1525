"""The runner of TorchRec's tests, on a checkout with tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.scripts import Ended, Script, Scripts

_TESTS = """
import time, unittest
import torch
from hypothesis import given, strategies as st
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase, TrainPipelineSparseDist
)

class SmallTest(unittest.TestCase):
    def setUp(self):
        self.device = torch.device("cuda:0")

    def _pipeline(self, kind=TrainPipelineBase, **options):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return kind(model, optimizer, self.device, **options)

    @unittest.skipIf(not torch.cuda.is_available(), "no GPU")
    def test_made(self):
        self.assertEqual(type(self._pipeline()).__module__.split(".")[0], "swpipe")

    @given(flag=st.booleans(), count=st.sampled_from([1, 2, 3]))
    def test_arguments(self, flag, count):
        pipeline = self._pipeline(TrainPipelineSparseDist, apply_jit=flag)
        self.assertLess(count, 3)

    @given(cache_precision=st.sampled_from([16, 32]), load_factor=st.sampled_from([0.2, 0.4]))
    def test_cache(self, cache_precision, load_factor):
        self._pipeline()

    def test_on_theirs(self):
        self.assertIn("torchrec.distributed", type(self._pipeline()).__module__)

    def test_needs_more(self):
        torch.zeros(1, device="meta").tolist()

    def test_hangs(self):
        self._pipeline()
        time.sleep(60)

    def test_alike(self):
        self._pipeline()
        self.fail("on any pipeline")
"""


_LACKS = "import a_module_that_is_missing"


@pytest.fixture(name="run")
def run_the_tests(torchrec_scripts: Scripts, tmp_path: Path) -> Callable[..., Ended]:
    """Run the runner on test modules."""

    def run(modules: dict[str, str], *args: str) -> Ended:
        checkout = tmp_path / f"{len(modules)}"
        folder = checkout / "torchrec/distributed/train_pipeline/tests"
        folder.mkdir(parents=True, exist_ok=True)
        for name, code in modules.items():
            (folder / f"test_{name}.py").write_text(code)
        return torchrec_scripts.run(Script(module="tests.peer", args=(str(checkout), *args)))

    return run


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_a_failure(run: Callable[..., Ended]) -> None:
    """It is one also if all other cases pass; once it was none if it was the only module."""
    done = run({"lacks": _LACKS})
    assert done.returncode == 1, done.stderr
    assert "not run: test_lacks.py (No module named 'a_module_that_is_missing')" in done.stdout
    assert "no case was run" in done.stdout
    done = run({"small": _TESTS, "lacks": _LACKS}, "test_made")
    assert "1 distinct cases" in done.stdout
    assert done.returncode == 1, done.stdout


@pytest.mark.slow
def test_every_case_is_counted_once(run: Callable[..., Ended]) -> None:
    """A case is a combination of arguments, with the reason for a failure; hangs are ended."""
    done = run({"small": _TESTS, "lacks": _LACKS}, "--timeout", "3")
    assert done.returncode == 1, done.stderr
    said = done.stdout
    for count, kind in [
        (4, "passed"),
        (3, "refused by design"),
        (2, "fails with TorchRec's pipeline too"),
        (1, "fails before a pipeline is made"),
        (1, "failed"),
        (1, "hung"),
    ]:
        assert f"  {count:4}  {kind}" in said, said
    assert "12 distinct cases" in said
    assert "3 more differ" in said
    assert "not run: test_lacks.py" in said
    assert "SmallTest.test_arguments(flag=True, count=3)" in said
    assert "failed: SmallTest.test_on_theirs\n    AssertionError: 'torchrec.dist" in said
    assert said.count("not run:") == 1

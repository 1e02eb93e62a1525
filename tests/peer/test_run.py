"""The runner, on a checkout with tests of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_modules_that_cannot_be_imported_are_a_failure(tmp_path: Path) -> None:
    """Nothing was found to be right: it ended with 0 cases and exit status 0."""
    folder = tmp_path / "torchrec/distributed/train_pipeline/tests"
    folder.mkdir(parents=True)
    (folder / "test_lacks.py").write_text("import a_module_that_is_missing")
    command = [sys.executable, "-m", "tests.peer", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "not run: test_lacks.py (No module named 'a_module_that_is_missing')" in done.stdout
    assert "no case was run" in done.stdout


@pytest.mark.slow
def test_one_module_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    """Although all cases of the others pass."""
    folder = tmp_path / "torchrec/distributed/train_pipeline/tests"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(_TESTS)
    (folder / "test_lacks.py").write_text("import a_module_that_is_missing")
    command = [sys.executable, "-m", "tests.peer", str(tmp_path), "test_made"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "1 distinct cases" in done.stdout
    assert done.returncode == 1, done.stdout


@pytest.mark.slow
def test_every_case_is_counted_once(tmp_path: Path) -> None:
    """Each combination of arguments, with its reason where it does not pass; a hang is ended."""
    folder = tmp_path / "torchrec/distributed/train_pipeline/tests"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(_TESTS)
    (folder / "test_lacks.py").write_text("import a_module_that_is_missing")
    command = [sys.executable, "-m", "tests.peer", str(tmp_path), "--timeout", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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

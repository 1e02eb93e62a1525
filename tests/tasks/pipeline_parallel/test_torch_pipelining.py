"""Only releases of torch whose runtime was tested are used."""

from __future__ import annotations

import pytest
import torch

from swpipe.tasks.pipeline_parallel.torch_pipelining import TESTED, check_torch


def test_a_tested_release_passes() -> None:
    """Whatever its build; the installed one is among them."""
    for version in (torch.__version__, *(f"{series}.1+cu130" for series in TESTED)):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.12.0", "2.16.0", "2.130.0", "12.13", "git"])
def test_another_release_is_refused(version: str) -> None:
    """In one line, with what is installed and what to install."""
    with pytest.raises(ImportError, match="private parts of torch.distributed.pipelining") as told:
        check_torch(version)
    assert str(told.value).startswith(f"torch {version} is installed, ")
    assert str(told.value).endswith("was tested with 2.13, 2.14, 2.15: install one of them")

"""Only releases of torch whose runtime was tested are used."""

from __future__ import annotations

import pytest
import torch

from swpipe.tasks.pipeline_parallel.torch_pipelining import TESTED, check_torch


def test_only_tested_releases_pass() -> None:
    """Any build passes; the error has one line with the installed and the needed release."""
    for version in (torch.__version__, *(f"{series}.1+cu130" for series in TESTED)):
        check_torch(version)
    for version in ("2.12.0", "2.16.0", "2.130.0", "12.13", "git"):
        with pytest.raises(ImportError, match="private parts of torch.distributed") as told:
            check_torch(version)
        assert str(told.value).startswith(f"torch {version} is installed, ")
        assert str(told.value).endswith("was tested with 2.13, 2.14, 2.15: install one of them")

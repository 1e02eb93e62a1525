"""Replacements with which TorchRec's GPU tests run on a CPU with gloo, on swpipe's pipelines.

Replaced are:

- names of pipelines, in TorchRec's modules, before the tests are imported;
- classes that tests name to recognise a replaced forward, in the tests' modules;
- ``torch.cuda.is_available`` and ``device_count`` while the tests are imported, which skip there;
- the device and the backend in ``setUp`` and in the functions that ranks run;
- CUDA streams, by None; the version of CUDA, too;
- moves of batches to the device, by copies: otherwise a second model in a test would share them;
- dicts that describe tables with managed ids (ZCH), by objects, as the model expects them;
- tables in the cache of a GPU (``FUSED_UVM_CACHING``) by tables without one, which is reported.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import sys
import unittest
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec._torchrec import torchrec_pipelines
from swpipe.tasks.torchrec.pipelines.named import NamedPipeline
from swpipe.tasks.torchrec.rewriting.forwards import SplitForward

TESTS = "torchrec.distributed.train_pipeline.tests"
CPU = torch.device("cpu")


def load_tests(checkout: Path, *, on_ours: bool) -> tuple[list[ModuleType], list[str]]:
    """Return a checkout's modules of tests, on our pipelines or TorchRec's, ready for a CPU.

    The second value has the names of those that could not be imported.

    Raises:
        FileNotFoundError: The checkout has none.
    """
    found = checkout.joinpath(*TESTS.split("."))
    names = sorted(path.stem for path in found.glob("test_*.py"))
    if not names:
        raise FileNotFoundError(
            f"{found} has no test_*.py: give the root of a checkout of TorchRec of the installed "
            "version, as in make peer-tests TORCHREC_TESTS=~/torchrec"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _extend_packages(checkout)
        if on_ours:
            _use_our_pipelines()
        with _as_if_gpus():
            found_modules = {name: _imported(name, on_ours) for name in names}
    modules = [module for module in found_modules.values() if module is not None]
    for module in modules:
        _adapt(module)
        if on_ours and hasattr(module, "EmbeddingPipelinedForward"):
            module.EmbeddingPipelinedForward = SplitForward
    return modules, [name for name, module in found_modules.items() if module is None]


def _told(made: Any, tell: Any) -> Any:
    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tell()
        made(self, *args, **kwargs)

    return init


def _no_stream(*_: Any, **__: Any) -> None:
    """Return None as the stream that tests make for a ``StagedTrainPipeline``."""


def forget_tests() -> None:
    """Remove the tests from the imported modules, to import them with other pipelines."""
    for name in [name for name in sys.modules if name.startswith(f"{TESTS}.")]:
        del sys.modules[name]


def report_use(descriptor: int, *, on_ours: bool) -> None:
    """Write "p" when a pipeline of ours or TorchRec's is made, and "c" for replaced tables."""
    kinds: tuple[Any, ...] = (torchrec_pipelines.TrainPipeline,)
    if on_ours:
        kinds = (NamedPipeline, ours.StagedTrainPipeline)
        torch.cuda.Stream = torch.cuda.current_stream = _no_stream  # type: ignore[assignment,misc]
    for kind in kinds:
        kind.__init__ = _told(kind.__init__, lambda: os.write(descriptor, b"p"))
    torch.version.cuda = None  # a build for CUDA spawns ranks, which would inherit none of this
    _copy_batches()
    _describe_managed_tables()
    _without_cache(lambda: os.write(descriptor, b"c"))


def _imported(name: str, tell: bool) -> ModuleType | None:
    try:
        return importlib.import_module(f"{TESTS}.{name}")
    except ImportError as error:
        if tell:
            print(f"not run: {name}.py ({error})")
        return None


def _extend_packages(checkout: Path) -> None:
    """Add the modules that only the checkout has to the installed packages."""
    for name in ("torchrec.distributed", "torchrec.distributed.train_pipeline"):
        package = importlib.import_module(name)
        folder = str(checkout.joinpath(*name.split(".")))
        if folder not in package.__path__:
            package.__path__.append(folder)


def _use_our_pipelines() -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torchrec.distributed.train_pipeline"):
            for name in ours.__all__:
                if hasattr(module, name):
                    setattr(module, name, getattr(ours, name))


def _as_if_gpus() -> Any:
    return mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 2)


def _adapt(module: ModuleType) -> None:
    for value in list(vars(module).values()):
        if inspect.isfunction(value):
            _default_to_gloo(value)
        elif inspect.isclass(value) and issubclass(value, unittest.TestCase):
            _adapt_case(value)


def _adapt_case(case: type[unittest.TestCase]) -> None:
    if "_run_multi_process_test" in vars(case):  # ranks inherit all of this
        case.__init__.__defaults__ = ("runTest", "fork")  # type: ignore[misc]
    if "setUp" not in vars(case) or getattr(case.setUp, "on_cpu", False):
        return
    original = case.setUp
    _default_to_gloo(original)

    @functools.wraps(original)
    def set_up(self: Any) -> None:
        original(self)
        if hasattr(self, "device"):
            self.device = CPU

    set_up.on_cpu = True  # type: ignore[attr-defined]
    case.setUp = set_up  # type: ignore[method-assign]


def _default_to_gloo(function: Any) -> None:
    function.__defaults__ = tuple(
        "gloo" if value == "nccl" else value for value in function.__defaults__ or ()
    )


def _copy_batches() -> None:
    for name in ("model_input", "test_model"):
        kind = importlib.import_module(f"torchrec.distributed.test_utils.{name}").ModelInput
        kind.to = lambda batch, *_, **__: copy.deepcopy(batch)


def _describe_managed_tables() -> None:
    test_model = importlib.import_module("torchrec.distributed.test_utils.test_model")
    kind = getattr(test_model, "TestEBCSparseArchZCH", None)
    original = getattr(kind, "_get_mc_module_from_tables", None)
    if kind is None or original is None:
        return  # before TorchRec 1.8

    def made(self: Any, tables: Any, device: Any, zch_kwargs: Any) -> Any:
        one = next(iter(zch_kwargs.values()))  # the tests name some tables only, all alike
        found = {table.name: zch_kwargs.get(table.name, one) for table in tables}
        described = {
            name: SimpleNamespace(**table) if isinstance(table, dict) else table
            for name, table in found.items()
        }
        return original(self, tables, device, described)

    kind._get_mc_module_from_tables = made


def _without_cache(told: Any) -> None:
    emb_sharder = importlib.import_module("torchrec.distributed.test_utils.emb_sharder")
    emb_sharder.TestEBCSharderMCH.compute_kernels = _kernel_of_the_tables
    for name in ("TestEBCSharder", "TestEBCSharderMCH"):
        sharder = getattr(emb_sharder, name)
        sharder.__init__ = _with_fused(sharder.__init__, told)


def _kernel_of_the_tables(sharder: Any, *args: Any) -> Any:
    """Return the kernels of managed tables too; a planner for GPUs may choose any."""
    return sharder._e_sharder.compute_kernels(*args)


def _with_fused(made: Any, told: Any) -> Any:
    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(made).bind(self, *args, **kwargs)
        if given.arguments["kernel_type"] == "fused_uvm_caching":
            told()
            given.arguments["kernel_type"] = "fused"
        made(*given.args, **given.kwargs)

    return init

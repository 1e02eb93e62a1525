"""Every import from TorchRec: the parts listed in ``private_parts``, under their names.

Deprecation warnings from importing TorchRec and fbgemm are suppressed.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from swpipe.tasks.torchrec.private_parts import PARTS, find, problems

FIRST = (1, 5)
LAST = (1, 9)
"""The first and the last release series of TorchRec that the tests run on."""

TESTED = "{}.{} to {}.{}".format(*FIRST, *LAST)
NEWEST = "torchrec=={}.{}.*".format(*LAST)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_version(version: str | None) -> None:
    """Raise ImportError for a missing TorchRec; warn if the tests do not run on its version."""
    if version is None:
        raise ImportError(
            f"swpipe.tasks.torchrec needs torchrec, tested with {TESTED}, and none is installed: "
            "see the install guide, which also says how to get it without CUDA"
        )
    series = re.match(r"(\d+)\.(\d+)", version)
    # Only a warning: what matters is whether the parts are there, which check_parts decides.
    if series is None or not FIRST <= tuple(map(int, series.groups())) <= LAST:
        warnings.warn(
            f"torchrec {version} is installed, and swpipe is tested with {TESTED}. It has the "
            "private parts that swpipe uses; compare a few losses with those of TorchRec's own "
            f"pipeline, or install {NEWEST}",
            stacklevel=2,
        )


def check_parts(version: str | None, lacks: list[str], cause: ImportError | None = None) -> None:
    """Raise ImportError, one line per problem, if parts are missing or an import failed."""
    if lacks or cause is not None:
        parts = lacks or [str(cause)]
        raise ImportError(
            "\n  ".join([f"torchrec {version} is not as swpipe.tasks.torchrec uses it:", *parts])
            + f"\ninstall {NEWEST}, with the torch and fbgemm that it goes with (see the install "
            "guide), or a newer swpipe"
        ) from cause


# Before the import, so that a missing TorchRec gives the message above and not that of import.
VERSION = installed_version("torchrec")
if VERSION is None:
    check_version(VERSION)

_PIPELINES = "torchrec.distributed.train_pipeline"
pipeline_modules: list[Any] = []
"""TorchRec's modules of pipelines."""

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        # torch.fx logs warnings while TorchRec is imported, about which a user can do nothing.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        importlib.import_module("torchrec")
        lacks = problems()
        # TorchRec before 1.7 lacks the second of these modules, and before 1.9 the third.
        for name in ("train_pipelines", "experimental_pipelines", "pec_train_pipeline"):
            with suppress(ModuleNotFoundError):
                pipeline_modules.append(importlib.import_module(f"{_PIPELINES}.{name}"))
except ImportError as error:
    check_parts(VERSION, [], error)
# Missing parts first: they explain more than an unknown version number.
check_parts(VERSION, lacks)
check_version(VERSION)

# Modules import the parts from here by name, without the leading underscore of private ones.
_FOUND: dict[str, Any] = {part.name.lstrip("_"): find(part) for part in PARTS}
globals().update(_FOUND)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a part by its name; for type checkers only."""


torchrec_pipelines: Any = _FOUND["train_pipelines"]

EXCHANGES: tuple[Any, ...] = tuple(value for name, value in _FOUND.items() if name.endswith("_Req"))
"""Autograd functions that start an exchange of embeddings; backward waits for gradients in them."""

PLAIN_TABLES = (_FOUND["ShardedEmbeddingBagCollection"], _FOUND["ShardedEmbeddingCollection"])
"""Sharded modules whose state an exchange of ids and a look-up leave unchanged."""


def torchrec_class(name: str) -> Any:
    """Return a pipeline class of the installed TorchRec, or None if there is none of that name."""
    known = (vars(module) for module in pipeline_modules)
    return next((names[name] for names in known if name in names), None)


def describe() -> str:
    """Return the installed versions in one line."""
    versions = {name: installed_version(name) for name in ("fbgemm-gpu", "fbgemm-gpu-cpu")}
    fbgemm = [f"{name} {version}" for name, version in versions.items() if version]
    return f"torchrec {VERSION} (tested: {TESTED}), {(fbgemm or ['no fbgemm'])[0]}"

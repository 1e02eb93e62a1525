"""The build of the simulated device, cached for each version of torch and of the source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]*"))
MAIN = Path(__file__).with_name("backend.cpp")
TORCH = Path(torch.__file__).parent
LIMIT_S = 300.0
OLDEST = "2.13"
"""The oldest torch that works; with torch 2.11 the device's kernels write past their buffers."""

# torch's own ABI flag: a library that is built with another one cannot be loaded.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-shared",
    "-fPIC",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    f"-I{TORCH / 'include'}",
    f"-I{TORCH / 'include/torch/csrc/api/include'}",
    f"-L{TORCH / 'lib'}",
    "-ltorch_cpu",
    "-lc10",
)


def why_not() -> str | None:
    """Return why the device cannot be built on this machine, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"the simulated device is built on Linux only, and this is {sys.platform}"
    if torch.accelerator.is_available() and not hasattr(torch, "sim"):
        return (
            f"this machine has an accelerator of its own: {torch.accelerator.current_accelerator()}"
        )
    if torch.__version__ < OLDEST:
        return f"the simulated device works with torch {OLDEST} and newer, not {torch.__version__}"
    if compiler() is None:
        return "there is no C++ compiler: neither $CXX nor g++ nor clang++"
    if not (TORCH / "include/torch/library.h").exists():
        return f"torch in {TORCH} has no C++ headers"
    return None


def compiler() -> str | None:
    """Return the path of the C++ compiler: the first of $CXX, g++ and clang++ that is installed."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def library() -> Path:
    """Return the path of the built library, and build it first if it is not in the cache.

    Raises:
        RuntimeError: The compiler failed; the message contains its output.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swpipe"
    # The digest covers all inputs of the build, so that a change of any of them builds anew. Where
    # torch is installed is none of them: every environment with this version uses one build.
    texts = (source.read_text() for source in SOURCES)
    flags = (flag for flag in FLAGS if str(TORCH) not in flag)
    identity = (*texts, torch.__version__, str(compiler()), *flags)
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    built = cache / f"sim-{digest}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # The system releases the lock of a process that dies, so a leftover lock file is harmless.
        with built.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have built the library while this one waited for the lock.
            if not built.exists():
                _build(built)
    return built


def _build(built: Path) -> None:
    """Compile the device into a file."""
    begin = time.monotonic()
    part = built.with_suffix(".part")
    # The libraries in FLAGS[-2:] must follow the source that uses their symbols.
    done = subprocess.run(
        [compiler() or "g++", *FLAGS[:-2], str(MAIN), *FLAGS[-2:], "-o", str(part)],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{MAIN.name} does not compile:\n{done.stderr[-4000:]}")
    seconds = time.monotonic() - begin
    # rename is atomic: no process loads a library that is only partly written.
    part.rename(built)
    sys.stderr.write(f"built the simulated device in {seconds:.1f} s: {built}\n")

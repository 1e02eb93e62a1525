"""Pages in a browser: Debian's Chromium, without a screen.

It needs no driver: the browser runs the page and a probe, a script of the test at the page's end,
writes the resulting document, and ends. Errors on the console are in its log.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHROMIUM = shutil.which("chromium")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"
)

LIGHT: tuple[str, ...] = ("--blink-settings=preferredColorScheme=1",)
DARK: tuple[str, ...] = ("--blink-settings=preferredColorScheme=0",)

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=10000"),
)
_TIMEOUT_S = 120.0
_SEEN = "data-seen"


class Seen(NamedTuple):
    """The result of a probe, and the errors on the console."""

    value: Any
    errors: list[str]


def browse(page: str, folder: Path, *flags: str) -> str:
    """Open a page; return the browser's output with its log."""
    assert CHROMIUM is not None
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout + done.stderr


def seen(page: str, folder: Path, probe: str, *flags: str) -> Seen:
    """Return what a probe sees of a page.

    Args:
        page: HTML.
        folder: An empty one.
        probe: The body of an asynchronous function of JavaScript, which returns plain data.
        flags: More for the browser, such as those of ``DARK``.
    """
    script = (
        f"<script>(async () => {{{probe}}})()"
        ".catch(error => ({failed: String(error)}))"
        f".then(value => document.body.setAttribute('{_SEEN}', JSON.stringify(value)))</script>"
    )
    head, _, tail = page.rpartition("</body>")
    printed = browse(f"{head}{script}</body>{tail}", folder, "--dump-dom", *flags)
    errors = re.findall(r"CONSOLE[^\]]*\] (.*)", printed)
    found = re.search(rf'{_SEEN}="([^"]*)"', printed)
    assert found is not None, printed[-2000:]
    return Seen(json.loads(unescape(found[1])), errors)

"""Make the pictures of reports: python docs/images/screenshots.py [NAME ...]

It writes each report in a temporary folder, prints what the report prints, and photographs its
first screen with Debian's Chromium. Run it on an idle machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
EXAMPLES = HERE.parent / "examples"

ONE = (sys.executable, "-m", "swpipe", "report")
REPORTS = {
    "report": (*ONE, "my_loop:loop", "--device", "cpu", "--rounds", "10"),
}
"""The command that writes the report, by picture."""

SCREEN = (1040, 640)
COLORS = 64  # of a picture; more make the file larger, and no clearer


def photograph(page: Path, picture: Path) -> None:
    """Write the first screen of a page as a picture."""
    with tempfile.TemporaryDirectory() as profile:
        flags = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", "--virtual-time-budget=10000", f"--user-data-dir={profile}"),
            *("--blink-settings=preferredColorScheme=1", f"--window-size={SCREEN[0]},{SCREEN[1]}"),
        )
        command = ["chromium", *flags, f"--screenshot={picture}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS).save(picture, optimize=True)


def main(names: list[str]) -> None:
    """Make the pictures with these names, or all."""
    for name in names or REPORTS:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "report.html")
            subprocess.run(
                [*REPORTS[name], "-o", str(page)],
                check=True,
                cwd=EXAMPLES,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            photograph(page, HERE / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Make the picture of a predicted and a measured step: python docs/images/predicted_step.py

Four ranks of gloo run torch's ZBV on stages that sleep. Run it on an idle machine; it takes 20 s,
needs matplotlib, and prints both steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from bench import predicted_schedules  # noqa: E402 - from the repository, wherever this is run
from swpipe.trace import Trace, plot_stacked  # noqa: E402
from tests.support.ranks import Ranks  # noqa: E402

RANKS = 4
COLORS = 64  # more make the file larger, and no clearer


def main() -> None:
    """Draw one step, and print its predicted and its measured time."""
    with Ranks(RANKS, deadline_s=200.0) as ranks:
        of_ranks = ranks.run(predicted_schedules.traced, "ZBV", 1.0)
    report = of_ranks[0][0]
    spans = [span for _, own in of_ranks for span in own]
    begin_ns = min(span.start_ns for span in spans)
    end_ns = max(span.end_ns for span in spans)
    print(f"predicted {report.makespan:.1f} ms, measured {(end_ns - begin_ns) / 1e6:.1f} ms")
    traces = {"predicted": report.trace(unit_s=1e-3), "measured": Trace(spans)}
    picture = HERE / "predicted_step.png"
    plot_stacked(traces, picture)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS).save(picture, optimize=True)


if __name__ == "__main__":
    main()

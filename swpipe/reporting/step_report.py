"""The report on a loop, as data, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from swpipe.core.files import write_atomically
from swpipe.reporting.loop_figures import LoopFigures, in_ms
from swpipe.reporting.page import page_of


class StepReport(LoopFigures):
    """A report. Its attributes are its figures; it prints, and it is a page.

    Attributes: see ``LoopFigures``.
    """

    __slots__ = ()

    def to_html(self) -> str:
        """The report as one page, which needs no network and no other file."""
        return page_of(self)

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        write_atomically(path, self.to_html())

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style is not the notebook's."""
        return f'<iframe srcdoc="{escape(self.to_html())}" width="100%" height="900"></iframe>'

    def format(self) -> str:
        """The verdict, the ceiling and the next step, a line each."""
        return "\n".join(self._lines())

    def __str__(self) -> str:
        return self.format()

    def _lines(self) -> Iterator[str]:
        ceiling, profile = self.ceiling, self.profile
        if self.busy:
            yield self.busy
        yield f"{self.verdict.bound}. {self.verdict.why}"
        yield f"step: {in_ms(profile.baseline_s)} ± {in_ms(profile.baseline_spread_s)} ms"
        yield (
            f"ceiling: any overlap can save {in_ms(ceiling.saved_s)} ms at most "
            f"({ceiling.share:.0%}); then limited by {ceiling.limit}"
        )
        if self.why_no_plan:
            yield f"no plan: {self.why_no_plan}"
        yield f"next step: {self.next_step}"
        for change in self.changes[:1]:
            saved = f"{in_ms(change.advice.saved_s)} ± {in_ms(change.advice.spread_s)} ms"
            tried = ""
            if change.tried is not None:
                value, spread = map(in_ms, change.tried)
                tried = f"; when it was tried, it saved {value} ± {spread} ms"
                tried += "" if change.kept else ", not as promised"
            yield f"  promises {saved}{tried}"
        if self.memory is not None:
            yield self.memory.format()

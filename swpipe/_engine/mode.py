"""The mode in which an iteration is admitted, and which stays the same until it is handed out.

Tasks of the caller's thread run under its torch settings of the moment. If the caller switched
gradients off while iterations are in flight, these would be finished without, and a model that it
sets to evaluation would evaluate batches that are to be trained on. So a call in another mode is
refused while iterations are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import is_grad_enabled, is_inference_mode_enabled

from swpipe.core.messages import shown


def checked_mode(mode: object) -> Callable[[], object]:
    """``mode``; TypeError if it cannot be called."""
    if callable(mode):
        return mode
    raise TypeError(f"mode is {shown(mode)}: give a function, such as lambda: model.training")


class Mode(NamedTuple):
    """torch's modes of the calling thread, and what the pipeline's user adds to them."""

    gradients: bool
    inference: bool
    other: object

    @classmethod
    def now(cls, other: object) -> Mode:
        """That of the calling thread."""
        return cls(is_grad_enabled(), is_inference_mode_enabled(), other)

    def switch(self, other: object, in_flight: int) -> Mode:
        """The mode of the calling thread, which is another one.

        Raises:
            RuntimeError: Iterations are in flight.
        """
        now = Mode.now(other)
        if in_flight:
            raise RuntimeError(
                f"the iterations in flight ({in_flight}) were admitted with {self}, and this call "
                f"is made with {now}: an iteration keeps its mode. Finish them in their mode "
                "before you change it: call drain(), or progress() to the end of their iterator"
            )
        return now

    def __str__(self) -> str:
        parts = [f"gradients {'on' if self.gradients else 'off'}"]
        if self.inference:
            parts.append("inference mode")
        return ", ".join([*parts, *([str(self.other)] if self.other else [])])

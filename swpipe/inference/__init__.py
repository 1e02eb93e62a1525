"""Inference of dependences: runs the tasks once or twice and records what each reads and writes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swpipe.inference.comparison import Comparison, Needed
    from swpipe.inference.record_tasks import record
    from swpipe.inference.recording import Dependences, Recording

__all__ = [
    "Comparison",
    "Dependences",
    "Needed",
    "Recording",
    "record",
]


_WHERE = {
    "record": "record_tasks",
    **dict.fromkeys(("Comparison", "Needed"), "comparison"),
}

if not TYPE_CHECKING:  # type checkers would infer Any for each name

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use.

        The checks of a run need none of these modules.
        """
        if name in __all__:
            return getattr(import_module(f"{__name__}.{_WHERE.get(name, 'recording')}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

"""Random numbers that a loader draws in this process, from generators that tasks draw from.

Two threads draw from one generator in an order that nobody knows, and its state does not tell who
has drawn. What begins with the second batch is seen by ``overlap``; this is for what begins later.

    torch             calls are seen on the thread that pulls
    Python and numpy  code of the loader that names ``random`` counts as drawing
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from swpipe.inference.reach import Reach

_FACTORIES = ("rand", "randn", "randint", "normal", "poisson", "bernoulli", "multinomial")
_IN_PLACE = (
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_",
    "log_normal_",
)  # fmt: skip
_LAYERS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "rrelu", "native_dropout",
)  # fmt: skip
DRAWING = frozenset(
    (*_FACTORIES, "randperm", "rand_like", "randn_like", "randint_like", *_IN_PLACE, *_LAYERS)
)
"""Functions of torch that draw from its default generators, unless they get another."""


class TorchDraws(TorchFunctionMode):
    """Within the block and on its thread, tells which function drew from a default generator.

    Attributes:
        function: Its name; empty if none did.
    """

    function = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function."""
        name = getattr(func, "__name__", "")
        if name in DRAWING and (kwargs or {}).get("generator") is None:
            self.function = name
        return func(*args, **(kwargs or {}))


def names_random(reach: Reach) -> bool:
    """Whether the code takes something of a module ``random``, of Python or numpy."""
    bound = (getattr(one, "__self__", None) for one in reach.holders.values())
    return "random" in reach.uses or any(isinstance(one, random.Random) for one in bound)

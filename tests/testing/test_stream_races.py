"""``find_races`` without an accelerator: in another process, on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swpipe.testing import find_races
from swpipe.testing.simulated.build import why_not

needs_device = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def no_wait() -> Iterator[Tensor]:
    """Yield from a batch that another stream is still copying."""
    device = torch.accelerator.current_accelerator()
    side = torch.Stream(device=device)
    for number in range(3):
        with side:
            batch = torch.full((8,), float(number)).to(device, non_blocking=True)
        yield batch.sum()


@needs_device
def test_the_simulated_device_is_in_another_process() -> None:
    """This process sees no accelerator before or after."""
    assert not torch.accelerator.is_available()
    race, *_ = find_races(no_wait)
    assert (race.first.operator, race.second.operator) == ("aten::_to_copy", "aten::sum")
    assert not torch.accelerator.is_available()


def test_a_loop_that_cannot_be_sent_is_refused() -> None:
    """The message says where to define it."""
    with pytest.raises(TypeError, match="define it at the top level of a module"):
        find_races(lambda: no_wait())


def test_a_number_of_iterations_below_one_is_refused() -> None:
    """Nothing is run."""
    with pytest.raises(ValueError, match="iterations is 0: give at least 1"):
        find_races(no_wait, iterations=0)

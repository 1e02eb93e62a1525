"""A pass that is left in the body of its last batch has no batch left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import swpipe

EPOCHS, BATCHES = 3, 3


def make(own: bool) -> Any:
    """Return a loop of three batches per pass, shuffled by its own or the default generator."""
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(torch.arange(6.0), 2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return swpipe.ahead(loader)


@pytest.mark.filterwarnings("ignore:nothing runs ahead")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("at", range(1, EPOCHS * BATCHES + 1))
def test_what_follows_a_break_is_the_rest_of_the_pass(own: bool, at: int) -> None:
    """The rest may have no batch; the numbers are those of a run that was never stopped."""
    torch.manual_seed(1)
    loop = make(own)
    right = [batch.tolist() for _ in range(EPOCHS) for batch in loop]
    torch.manual_seed(1)
    loop, found, stopped = make(own), list[Any](), 0
    for epoch in range(EPOCHS):
        for batch in loop:
            found.append(batch.tolist())
            if len(found) == at:
                break
        if len(found) == at:
            stopped = epoch
            break
    state = loop.state_dict(rest=True)
    torch.manual_seed(77)
    loop = make(own)
    loop.load_state_dict(state)
    found += [batch.tolist() for _ in range(stopped, EPOCHS) for batch in loop]
    assert found == right

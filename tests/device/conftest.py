"""The kinds of device in this process (see ``kinds``), and the tests that run on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import backend
from tests.device import kinds
from tests.device.kinds import Kind
from tests.support.device_work import SIMULATED

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests of kinds of device that this process does not have."""
    apart: bool = config.getoption("--accelerator")
    return True if collection_path == HERE / ("virtual" if apart else "accelerator") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``kind`` with all kinds, and ``device`` with a device per kind with streams."""
    here = kinds.APART if metafunc.config.getoption("--accelerator") else kinds.HERE
    if {"kind", "guard"} <= {*metafunc.fixturenames}:
        from tests.device.virtual.guards import GUARDS

        pairs = [(kind, guard) for kind in here for guard in GUARDS if kind.name in guard.shows_on]
        ids = [f"{kind}-{guard.name}" for kind, guard in pairs]
        metafunc.parametrize(("kind", "guard"), pairs, ids=ids)
    elif "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", here, ids=str)
    if "device" in metafunc.fixturenames and metafunc.definition.path.parent == HERE:
        metafunc.parametrize("device", [k for k in here if k.new], ids=str, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need an accelerator if there is none."""
    reason = backend.why_not() if SIMULATED else None
    if config.getoption("--accelerator") and reason is not None:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    """A new device with streams; a virtual one checks at the end whether its rules were kept."""
    kind: Kind = request.param
    assert kind.new is not None
    made = kind.new()
    yield made
    if hasattr(made, "check"):
        made.check()

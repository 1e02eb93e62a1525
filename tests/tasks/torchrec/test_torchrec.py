"""Which TorchRec is taken, and what is said of another."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from swpipe.tasks.torchrec._torchrec import VERSION, check_parts, check_version, describe
from swpipe.tasks.torchrec.private_parts import PARTS, Part, problems
from tests.support.scripts import Script, Scripts


@pytest.mark.parametrize("version", ["1.5.0", "1.8", "1.8.1+cu130", "1.9.2"])
def test_a_tested_series_is_taken_in_silence(version: str) -> None:
    """Whatever its patch level and build."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)


@pytest.mark.parametrize("version", ["1.4.9", "1.10.0", "1.50", "2.6", "unknown"])
def test_another_series_is_taken_with_a_warning(version: str) -> None:
    """It has the parts; the warning says what was tested, and what to do."""
    said = rf"{version} is installed.*tested with 1\.5 to 1\.9.*compare a few losses.*==1\.9\.\*"
    with pytest.warns(UserWarning, match=said):
        check_version(version)


def test_no_torchrec_is_told() -> None:
    """Not as a missing module somewhere inside."""
    with pytest.raises(ImportError, match=r"tested with 1\.5 to 1\.9, and none is installed"):
        check_version(None)


def test_it_says_what_it_found() -> None:
    """TorchRec's version and fbgemm's."""
    assert describe().startswith(f"torchrec {VERSION} (tested: 1.5 to 1.9)")
    assert "fbgemm" in describe()


def _torchrec_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with classes as a later release might have them."""

    class Helper:
        limit: int

        def __init__(self, model: object, depth: int, stream: object = None) -> None:
            self._model, self.depth, self._stream = model, depth, stream

        def find(self, node: object, deep: bool = False) -> object:
            return node, deep

        @classmethod
        def of(cls, name: str) -> Helper:
            return cls(name, 1)

    here, there = ModuleType("torchrec.future"), ModuleType("torchrec.elsewhere")
    here.Helper = Helper  # type: ignore[attr-defined]
    there.Moved = type("Moved", (), {"__module__": "torchrec.elsewhere"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, here.__name__, here)
    monkeypatch.setitem(sys.modules, there.__name__, there)


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        ({"takes": "model, depth"}, ""),
        ({"takes": "model"}, r"Helper takes \(model, depth, stream=None\), and was \(model\)"),
        ({"calls": {"find": "node"}}, ""),
        ({"calls": {"find": "node, deeper"}}, r"Helper.find takes \(node.*was \(node, deeper\)"),
        ({"calls": {"seek": "node"}}, "Helper.seek is gone"),
        ({"calls": {"of": "name"}}, ""),
        ({"calls": {"of": ""}}, r"Helper.of takes \(name\)"),
        ({"replaces": {"find": "node, deep"}}, ""),
        ({"replaces": {"find": "node"}}, "Helper.find takes"),
        ({"has": "_model depth limit"}, ""),
        ({"has": "_model width"}, "Helper has no 'width'"),
    ],
)
def test_a_part_that_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, uses: dict[str, object], said: str
) -> None:
    """Parameters that are given and gone, or needed and not given; attributes that nothing sets."""
    _torchrec_of_the_future(monkeypatch)
    found = problems((Part(module="torchrec.future", name="Helper", **uses),))  # type: ignore[arg-type]
    if not said:
        assert found == []
        return
    (line,) = found
    with pytest.raises(ImportError, match=rf"torchrec 1\.12\.0 is not as .*\n  .*{said}.*\n.*==1"):
        check_parts("1.12.0", [line])


def test_a_part_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the module of TorchRec's that has its name now."""
    _torchrec_of_the_future(monkeypatch)
    parts = tuple(
        Part(module=place, name="Moved") for place in ("torchrec.future", "torchrec.no.such")
    )
    assert problems(parts) == [
        f"{part} is gone; torchrec.elsewhere has that name" for part in parts
    ]


def test_an_import_that_fails_for_another_reason_keeps_it() -> None:
    """Such as a build of fbgemm for another torch."""
    cause = ImportError("undefined symbol: at::tensor")
    with pytest.raises(ImportError, match=r"undefined symbol.*\n.*goes with") as raised:
        check_parts("1.9.2", [], cause)
    assert raised.value.__cause__ is cause


def test_the_installed_torchrec_has_all_parts() -> None:
    """As its import has found."""
    assert problems() == []


COMPARING = Path(__file__).parents[3] / ".ci/torchrec_release.py"


@pytest.mark.skipif(not COMPARING.exists(), reason="needs the repository")
def test_a_new_release_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its version, what is gone, and the lines of source that have changed; exit status 1."""
    script = runpy.run_path(str(COMPARING))
    name, source = next((n, s) for n, s in script["sources"]().items() if n.endswith("input_dist"))
    here = {"version": "1.8", "problems": [], "sources": {name: source, "gone": source}}
    changed = {name: source.replace("self", "this")}
    new = {"version": "7.0", "problems": ["a.b takes (c)"], "sources": changed}
    compared = script["main"].__globals__
    monkeypatch.setitem(compared, "_look", lambda: here)
    monkeypatch.setitem(compared, "_look_at", lambda *_: new)
    monkeypatch.setattr(sys, "argv", [str(COMPARING), "new"])
    assert script["main"]() == 1
    said = capsys.readouterr().out
    assert "torchrec 1.8 is installed; new has 7.0" in said
    assert "not as expected: a.b takes (c)" in said
    assert f"{name} has changed:" in said
    assert "this," in said
    assert "gone is no function any more" in said
    assert f"{len(PARTS)} parts: 1 not as expected, 2 changed" in said


@pytest.mark.slow
def test_the_import_is_silent(scripts: Scripts) -> None:
    """Neither a warning nor a log line reaches the user."""
    code = "import warnings; warnings.simplefilter('error')\n"
    code += "import swpipe.tasks.torchrec.pipelines.semi_sync"
    assert scripts.run(Script(code)) == (0, "", "")

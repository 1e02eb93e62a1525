"""A click log generated from a known model, for trials without data.

Ids follow Zipf's law, as in real logs: few are frequent, most are rare. Whether a row
was clicked is drawn from a logistic model over weights of the ids, the integers, and products of
pairs of ids, so that a model can learn it, up to a limit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swpipe.tasks.clicks._polars import pl
from swpipe.tasks.clicks.log import IDS, INTEGERS, LABEL

Floats = NDArray[np.float64]

TRAIN_ROWS = 300_000
HELD_OUT_ROWS = 50_000

_CARDINALITIES = (
    10, 500, 3000, 2500, 60, 12, 4000, 80, 3, 3500, 2000, 3000, 1800,
    26, 3500, 3000, 10, 2500, 1200, 4, 3000, 12, 15, 3000, 60, 2500,
)  # fmt: skip
_ID_MISSING = (0.0, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0,
               0.0, 0.0, 0.03, 0.0, 0.0, 0.4, 0.4, 0.03, 0.7, 0.0, 0.03, 0.4, 0.4)  # fmt: skip
_INTEGER_MISSING = (0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.04, 0.0, 0.04, 0.45, 0.04, 0.75, 0.2)
_ZIPF_EXPONENT = 1.1
_PAIRS = ((0, 1), (4, 6), (7, 9), (13, 16), (17, 24), (19, 25))  # id features that interact
_CHUNK = 50_000  # rows made together


class GeneratedLogs(NamedTuple):
    """The two parts of a generated log, drawn from the same model."""

    train: Path
    held_out: Path


class PlantedModel:
    """The model that clicks are drawn from.

    Args:
        seed: Two models of the same seed are the same.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self._arrivals = [_zipf(count) for count in _CARDINALITIES]
        self._names = [_names(feature, count) for feature, count in enumerate(_CARDINALITIES)]
        self._weights = [rng.normal(0.0, 0.45, count) for count in _CARDINALITIES]
        self._factors = [rng.normal(0.0, 0.6, count) for count in _CARDINALITIES]
        self._slopes = rng.normal(0.0, 0.2, len(INTEGERS))
        self._scales = rng.uniform(0.5, 3.0, len(INTEGERS))

    def rows(self, count: int, rng: np.random.Generator) -> pl.DataFrame:
        """Draw rows: 40 columns of the log format, a missing value being null."""
        ids = [np.searchsorted(arrivals, rng.random(count)) for arrivals in self._arrivals]
        id_gone = [rng.random(count) < share for share in _ID_MISSING]
        logs = rng.normal(self._scales, 1.0, (count, len(INTEGERS))).clip(-1.0)
        integers = np.floor(np.expm1(logs)).astype(np.int64)  # -1 and up, as in the real log
        integer_gone = rng.random(integers.shape) < _INTEGER_MISSING
        logit = np.full(count, -1.3)
        for feature, weights in enumerate(self._weights):
            logit += np.where(id_gone[feature], 0.0, weights[ids[feature]])
        for a, b in _PAIRS:
            product = self._factors[a][ids[a]] * self._factors[b][ids[b]]
            logit += np.where(id_gone[a] | id_gone[b], 0.0, product)
        logit += np.where(integer_gone, 0.0, (logs - self._scales) * self._slopes).sum(axis=1)
        clicked = rng.random(count) < 1.0 / (1.0 + np.exp(-logit))
        columns = [
            pl.Series(LABEL, clicked.astype(np.uint8)),
            *(
                pl.Series(name, integers[:, k]).set(pl.Series(integer_gone[:, k]), None)
                for k, name in enumerate(INTEGERS)
            ),
            *(
                self._names[k]
                .gather(pl.Series(ids[k]).set(pl.Series(id_gone[k]), None))
                .alias(name)
                for k, name in enumerate(IDS)
            ),
        ]
        return pl.DataFrame(columns)


def click_logs(
    directory: str | Path,
    *,
    train_rows: int | None = None,
    held_out_rows: int | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> GeneratedLogs:
    """The generated log in ``directory``, written if it is not there yet.

    A file gets its name only when it is complete, so an interrupted run leaves no partial
    file under that name.

    Args:
        directory: Created where it is missing.
        train_rows: Rows to train on; None for ``TRAIN_ROWS``.
        held_out_rows: Rows to evaluate on; None for ``HELD_OUT_ROWS``.
        seed: Of the planted model and of the draws.
        progress: Called with the number of rows just written; never called if all is there.
    """
    directory = Path(directory)
    sizes = {
        "train": TRAIN_ROWS if train_rows is None else train_rows,
        "held-out": HELD_OUT_ROWS if held_out_rows is None else held_out_rows,
    }
    logs = GeneratedLogs(*(directory / f"{part}-{rows}-{seed}.tsv" for part, rows in sizes.items()))
    for number, (path, rows) in enumerate(zip(logs, sizes.values(), strict=True), 1):
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng([seed, number])
            _write(path, PlantedModel(seed), rows, rng, progress)
    return logs


def _write(
    path: Path,
    planted: PlantedModel,
    rows: int,
    rng: np.random.Generator,
    progress: Callable[[int], object] | None,
) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        try:
            for first in range(0, rows, _CHUNK):
                count = min(_CHUNK, rows - first)
                planted.rows(count, rng).write_csv(file, include_header=False, separator="\t")
                if progress:
                    progress(count)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _zipf(count: int) -> Floats:
    """Cumulative probabilities of the ids 0 to count - 1."""
    share = np.arange(1, count + 1, dtype=np.float64) ** -_ZIPF_EXPONENT
    total: Floats = share.cumsum() / share.sum()
    total[-1] = 1.0  # rounding must not leave a gap at the end
    return total


def _names(feature: int, count: int) -> pl.Series:
    """Each id's 8 hexadecimal digits; an odd factor makes them distinct within a feature."""
    return pl.Series(
        [f"{(id_ * 0x9E3779B1 + feature * 0x85EBCA6B) % 2**32:08x}" for id_ in range(count)]
    )

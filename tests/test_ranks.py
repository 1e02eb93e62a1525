"""With torch.distributed initialised, ranks with different plans refuse to start."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from swpipe import SWPipeline
from tests.plans_for_tests import piped, tasks


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said = []
    for depths in ((3, 3), (3, 4)):
        with SWPipeline(piped(depths[rank]), tasks()) as pipe:
            try:
                said.append(str(pipe.run(range(4)).iterations))
            except RuntimeError as error:
                said.append(str(error))
    (Path(folder) / f"said{rank}").write_text("\n".join(said))
    dist.destroy_process_group()


def test_ranks_with_different_plans_refuse_to_start(tmp_path: Path) -> None:
    """Both ranks say which ranks hold which plan; with equal plans they run."""
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        ran, refused = (tmp_path / f"said{rank}").read_text().splitlines()
        assert ran == "4"
        assert "the ranks hold different plans" in refused
        assert f"for ever: digest: {piped(3).digest()[:12]} on rank 0, " in refused
        assert "; depth: 3 on rank 0, 4 on rank 1. Give every rank" in refused

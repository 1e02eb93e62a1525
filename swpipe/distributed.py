"""Exchanges and agreements between the ranks of a job, for the authors of systems.

- ``gather`` and ``host_group`` exchange small objects outside the training's own collectives.
- ``plan_facts``, ``differences`` and ``name_ranks`` describe in what the plans of ranks differ.
- ``job_store`` is the job's store. ``within`` limits the time of a call that may not return, such
  as a request to a store whose process has ended.
- ``EvenIterator`` yields batches until the first rank has none left; ``batches_left`` tells how
  many an iterator has, where that is known for certain.

Stability: provisional. Names may change in a minor release, with an entry in the changelog.
"""

from swpipe._distributed.agreement import differences, name_ranks, plan_facts
from swpipe._distributed.batches_left import batches_left
from swpipe._distributed.even_data import EvenIterator, UnevenDataError
from swpipe._distributed.rank_checks import STORE_S, gather, host_group, job_store, within

__all__ = [
    "STORE_S",
    "EvenIterator",
    "UnevenDataError",
    "batches_left",
    "differences",
    "gather",
    "host_group",
    "job_store",
    "name_ranks",
    "plan_facts",
    "within",
]

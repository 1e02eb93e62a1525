"""What keeps work from overlapping, each with its mend; and what overlap can gain at most."""

from swpipe.doctor.diagnosis import Diagnosis, Finding, Headroom
from swpipe.doctor.examination import diagnose

__all__ = ["Diagnosis", "Finding", "Headroom", "diagnose"]

"""What can be said of a plan before it runs: whether it can run, and gives the serial numbers."""

from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.verification import Verified, verify

__all__ = ["HappensBefore", "Verified", "verify"]

"""What can be said of a plan before it runs. ``verify`` is the one call that says all of it."""

from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.verification import Verified, verify

__all__ = ["HappensBefore", "Verified", "verify"]

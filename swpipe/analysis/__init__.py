"""Checks of a plan before it runs: is it valid, and does it give the serial numbers?"""

from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.verification import Verified, verify
from swpipe.core.effects import Effects, Location

__all__ = ["Effects", "HappensBefore", "Location", "Verified", "verify"]

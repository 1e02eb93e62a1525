"""The command line: train the click job under any plan, compare, profile, look at timelines.

What the user got wrong ends in one line on stderr and exit code 2; training that diverged, in one
line and exit code 1.
"""

from swpipe.cli.app import main

__all__ = ["main"]

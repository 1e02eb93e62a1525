"""The command line: train a workload under any plan, compare, profile, plan, look at timelines.

A mistake of the user ends the command with one line on stderr and exit code 2. If training cannot
continue, the command ends with one line and exit code 1.
"""

from swpipe.cli.app import main

__all__ = ["main"]

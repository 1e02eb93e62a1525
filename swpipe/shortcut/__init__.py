"""Replay of a task's outputs in place of a run, with autograd kept connected."""

from swpipe.shortcut.shortcuts import Shortcuts

__all__ = ["Shortcuts"]

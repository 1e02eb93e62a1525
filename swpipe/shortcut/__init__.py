"""Replay a task's outputs instead of running it, with autograd kept connected."""

from swpipe.shortcut.shortcuts import Shortcuts

__all__ = ["Shortcuts"]

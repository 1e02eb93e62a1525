"""Replay what a task produced instead of running it, with autograd kept connected."""

from swpipe.shortcut.shortcuts import Shortcuts

__all__ = ["Shortcuts"]

"""Compile a plan and run it: instructions, threads, waiting, failure."""

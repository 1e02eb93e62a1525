"""Checks that all ranks of a job agree."""

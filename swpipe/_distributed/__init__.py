"""Checks and agreements across the ranks of a job."""

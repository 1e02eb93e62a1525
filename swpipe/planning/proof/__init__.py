"""Proofs of how good a plan is, by a constraint solver."""

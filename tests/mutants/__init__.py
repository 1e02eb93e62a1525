"""Planted faults: small edits, each of which removes one guard, and the tests that must miss it."""

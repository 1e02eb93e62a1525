"""Planted faults: small edits that each remove one guard, and the tests that must find them."""

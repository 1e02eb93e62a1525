"""Values: one walk, one fingerprint, one log of a context, and state that is restored bit for bit.

This package depends on torch, but on neither tasks nor the engine.
"""

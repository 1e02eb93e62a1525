"""Values: one walk, one fingerprint, one log of a context, and state that is put back bit for bit.

This room knows torch, and neither tasks nor the engine.
"""

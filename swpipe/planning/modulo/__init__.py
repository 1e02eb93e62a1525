"""Planning by modulo scheduling, and proofs of how good the plans are."""

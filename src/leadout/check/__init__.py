"""Proof that a target and a drafter belong together, or the cause why they do not."""

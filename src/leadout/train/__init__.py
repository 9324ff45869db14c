"""Training a drafter on the target's own answers, and telling what it will accept when served."""

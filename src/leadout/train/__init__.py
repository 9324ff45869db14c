"""Training a drafter on the target's own answers, and verifying its acceptance in vLLM."""

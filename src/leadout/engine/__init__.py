"""The only rooms that know vLLM."""

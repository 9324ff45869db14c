"""Arms against bare vLLM: real servers, vLLM's load generator, rounds, ratios with their spread."""

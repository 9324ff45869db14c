"""`leadout bench`: how much faster a drafter serves than bare vLLM, measured with real load."""

"""`leadout tune`: how many tokens to draft at each batch size, for one pair on one machine."""

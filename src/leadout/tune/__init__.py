"""How many tokens to draft at each batch size, measured for one pair on one machine."""

"""Training data: prompts from files, datasets or the target itself, answered by the target."""

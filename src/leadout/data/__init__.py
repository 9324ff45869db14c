"""On-policy training text: prompts from anywhere, answers by the target itself, kept as shards."""

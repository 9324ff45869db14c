"""What tests share: models, drafters, prompts, processes."""

"""From a target to a checked and tuned drafter: all stages in one resumable command."""

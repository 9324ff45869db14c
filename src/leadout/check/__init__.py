"""Whether a drafter fits a target: from files, in the engine, and the cause if it does not."""

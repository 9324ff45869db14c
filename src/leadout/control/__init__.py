"""The draft-length policy, in pure Python: what drafts cost, what they bring, what pays."""

"""The draft-length policy, in pure Python, without torch or vLLM.

`policy` decides at every step by the throughput that follows from `cost_model` and
`acceptance_model`. `prompt_lookup` makes drafts from a request's own
text, `tuned_file` holds what `leadout tune` measured, and `rollback` tests a drafter that was just
swapped in.
"""

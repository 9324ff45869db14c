"""Training data: prompts from files, datasets or the target itself, answered by the target.

- `settings`: of `leadout data`, and what they mean for plain and for reasoning targets
- `prompts`: reads conversations from files and datasets
- `chat`: renders conversations with the target's chat template
- `generate`: runs a job; `answers`: its queue; `endpoints`: servers that answer it
- `manifest`: the folder that a job fills
- `prompt_record`: which prompts a drafter was trained on
"""

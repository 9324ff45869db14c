"""DFlash: a block-diffusion drafter in front of a target language model. Needs torch only."""

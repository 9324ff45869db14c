"""The tiny targets are quick to build and the same each time."""

import time
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from support import models


@pytest.mark.parametrize("build", [models.tiny_qwen3, models.tiny_llama])
def test_tiny_targets_are_quick_and_repeatable(build: Callable[[int], PreTrainedModel]) -> None:
    build(0)  # the first build pays for lazy imports
    started = time.process_time()
    first = build(1)
    assert time.process_time() - started < 4.0

    again, other = build(1), build(2)
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(first(tokens).logits, again(tokens).logits)
        assert not torch.equal(first(tokens).logits, other(tokens).logits)

"""Settings of a data job: what they mean for plain and reasoning targets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadout.data.manifest import Sampling, SamplingOptions
from leadout.data.settings import PLAIN, REASONING, DataSettings
from leadout.settings import SettingsError


def settings(**changes: Any) -> DataSettings:
    required = {"target": "t", "prompts": ("self:1",), "out": Path("o")}
    return DataSettings.resolve(required | changes)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 32768}))
    advice = {"temperature": 0.55, "top_p": 0.9, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    return tmp_path


def test_plain_targets_keep_their_defaults(target: Path) -> None:
    made = settings().sampling(target, reasons=False)
    assert made == Sampling(**PLAIN._asdict(), samples_per_prompt=1, seed=0)


def test_reasoning_targets_are_sampled_as_they_were_published(target: Path) -> None:
    made = settings().sampling(target, reasons=True)
    assert made.greedy_share == 0
    assert (made.temperature, made.top_p) == (0.55, 0.9)
    assert made.options == SamplingOptions(top_k=20)
    assert (made.max_new_tokens, made.max_length) == (
        REASONING.max_new_tokens,
        REASONING.max_length,
    )
    changed = settings(temperature=1.0, greedy_share=0.1, sampling_options='{"top_k": 5}')
    made = changed.sampling(target, reasons=True)
    assert (made.temperature, made.greedy_share, made.options.top_k) == (1.0, 0.1, 5)
    (target / "generation_config.json").write_text('{"top_k": -1}')  # all tokens
    assert settings().sampling(target, reasons=True).options == SamplingOptions()
    (target / "generation_config.json").unlink()
    made = settings().sampling(target, reasons=True)
    assert (made.temperature, made.top_p) == (REASONING.temperature, REASONING.top_p)


def test_lengths_fit_each_other_and_the_target(target: Path) -> None:
    def lengths(reasons: bool = True, **given: int) -> tuple[int, int]:
        made = settings(**given).sampling(target, reasons)
        return made.max_new_tokens, made.max_length

    assert lengths(max_new_tokens=20000) == (20000, 22048)
    assert lengths(max_length=1000) == (800, 1000)
    assert lengths(reasons=False, max_length=1000) == (512, 1000)
    (target / "config.json").write_text('{"text_config": {"max_position_embeddings": 4096}}')
    assert lengths() == (3276, 4096)
    with pytest.raises(SettingsError, match=r"--max-new-tokens 20000 must be less than .* 4096"):
        lengths(max_new_tokens=20000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_options": "{"}, "--sampling: .*expected a JSON object"),
        ({"sampling_options": "[1]"}, r"--sampling: got '\[1\]'"),
        ({"sampling_options": '{"top_q": 1}'}, "top_q is not one of top_k, min_p"),
        ({"sampling_options": '{"min_p": 2}'}, "--sampling: min_p: .*less than or equal to 1"),
        ({"sampling_options": '{"temperature": 1}'}, "has its own flag, --temperature"),
        ({"chat_template_kwargs": "3"}, "--chat-template-kwargs: got '3'"),
        ({"endpoint": ("gpu1:8000",)}, "--endpoint: got 'gpu1:8000', expected an address"),
        ({"endpoint": ("http://a", "http://a")}, "the same server is given twice"),
        ({"endpoint": ("http://a", "http://a/v1")}, "the same server is given twice"),
        ({"endpoint": ("http://a/v1/", "http://a/")}, "the same server is given twice"),
        ({"endpoint": ("http://a",), "dtype": "float32"}, "--dtype cannot be combined with --end"),
        ({"endpoint": ("http://a",), "vllm_flags": ("-tp", "2")}, r"vLLM's flags \(-tp\) cannot"),
        ({"served_model": "a"}, "--served-model requires --endpoint"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(**changes)


def test_answers_cannot_be_required_to_be_longer_than_allowed(target: Path) -> None:
    wanted = settings(sampling_options='{"min_tokens": 600}')
    with pytest.raises(SettingsError, match=r"min_tokens is 600, expected at most .* 512"):
        wanted.sampling(target, reasons=False)

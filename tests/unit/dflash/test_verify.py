"""Verification changes how fast text is written, never which text."""

import pytest
import torch
from torch import Tensor

from leadout.dflash import verify
from leadout.dflash.verify import Sampling, distribution, draw, verify_greedy, verify_sampled
from support.statistics import equality_p_value

VOCAB = 7


def one_hot_logits(*rows: list[int]) -> Tensor:
    """Logits [batch, K+1, vocab] whose best token at each place is the given one."""
    return torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float()


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted", "next_token"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),  # all accepted: the bonus token
        ([1, 2, 3], [1, 2, 5, 4], 2, 5),  # a wrong third: its correction
        ([1, 2, 3], [0, 2, 3, 4], 0, 0),  # right ones after a wrong one do not count
        ([1, 2, 3], [1, 0, 3, 4], 1, 0),
        ([], [6], 0, 6),  # no drafts: plain decoding
    ],
)
def test_greedy_verification(
    drafts: list[int], choices: list[int], accepted: int, next_token: int
) -> None:
    # A second row that accepts nothing must not disturb the first.
    other = [(token + 1) % VOCAB for token in drafts]
    tokens = torch.tensor([drafts, other]).long().view(2, len(drafts))
    verdict = verify_greedy(tokens, one_hot_logits(choices, [*drafts, 6]))
    assert verdict.accepted.tolist() == [accepted, 0]
    assert verdict.next_token.tolist() == [next_token, drafts[0] if drafts else 6]


def test_distribution_applies_temperature_then_top_k_then_top_p() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert distribution(logits, Sampling(1.0)).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    squared = torch.tensor([1.0, 4.0, 9.0, 16.0])
    assert distribution(logits, Sampling(0.5)).tolist() == pytest.approx(
        (squared / squared.sum()).tolist()
    )
    assert distribution(logits, Sampling(1.0, top_k=2)).tolist() == pytest.approx(
        [0, 0, 3 / 7, 4 / 7]
    )
    assert distribution(logits, Sampling(1.0, top_p=0.5)).tolist() == pytest.approx(
        [0, 0, 3 / 7, 4 / 7]
    )
    # Top-p counts among what top-k left: 4/7 alone is not yet 0.6.
    assert distribution(logits, Sampling(1.0, top_p=0.5, top_k=2)).tolist() == pytest.approx(
        [0, 0, 0, 1]
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("top_k", -1)],
)
def test_impossible_sampling_is_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        Sampling(**{"temperature": 1.0, setting: value})  # type: ignore[arg-type]


SAMPLES = 40_000
# A false alarm of this test is one in ten thousand per case, over the choice of the seed.
ALARM = 1e-4


def one_step(drawn: bool, seed: int) -> tuple[list[int], list[int]]:
    """Tokens of the first position from speculation, and drawn from the target alone."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.06, 0.04, 0.0])
    guess = torch.tensor([0.05, 0.3, 0.1, 0.3, 0.1, 0.05, 0.1])
    p = target.expand(SAMPLES, 2, VOCAB)
    q = guess.expand(SAMPLES, 1, VOCAB)
    drafts = draw(q, generator) if drawn else torch.full((SAMPLES, 1), 1)
    verdict = verify_sampled(drafts, p, q if drawn else None, generator)
    kept = torch.where(verdict.accepted > 0, drafts[:, 0], verdict.next_token)
    return kept.tolist(), draw(p[:, 0], generator).tolist()


@pytest.mark.parametrize("drawn", [True, False])
def test_sampled_verification_yields_the_targets_distribution(drawn: bool) -> None:
    assert equality_p_value(*one_step(drawn, seed=1)) > ALARM


@pytest.mark.parametrize("drawn", [True, False])
def test_the_gate_fires_on_a_verifier_that_is_too_kind(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = torch.rand
    monkeypatch.setattr(verify.torch, "rand", lambda *a, **k: honest(*a, **k) * 0.9)
    assert equality_p_value(*one_step(drawn, seed=1)) < ALARM


def test_a_draft_that_the_target_excludes_is_never_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.5, 0.0]).expand(1000, 2, 3)
    verdict = verify_sampled(torch.full((1000, 1), 2), p, None, generator)
    assert verdict.accepted.sum() == 0
    assert set(verdict.next_token.tolist()) == {0, 1}


def test_a_draft_that_is_certain_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.0, 1.0, 0.0]).expand(1000, 2, 3)
    verdict = verify_sampled(torch.full((1000, 1), 1), p, None, generator)
    assert verdict.accepted.sum() == 1000

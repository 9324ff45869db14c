"""A text that speculation changed is found, and a near-tie is not taken for one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leadout.check.lossless import compare_answers, finding_of, first_divergence, ulp
from leadout.findings import Severity
from support.models import tiny_llama

PROMPT = [5, 9, 2, 44, 7, 7, 31, 200, 13]
ANSWER = [17, 18, 19, 20]
PORTION = 5


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama().to(torch.bfloat16)


@pytest.fixture(scope="module")
def ranked(model: nn.Module) -> Tensor:
    """The tokens after the first two of the answer, the likeliest first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + ANSWER[:2]])).logits[0, -1]
    return logits.float().argsort(descending=True)


def compared(
    model: nn.Module, bare: list[int], drafted: list[int], precision: torch.dtype = torch.bfloat16
):
    return compare_answers(
        model, {"a": [PROMPT]}, {"a": [bare]}, {"a": [drafted]}, precision, PORTION
    )


def test_equal_texts_are_lossless(model: nn.Module) -> None:
    lossless = compared(model, ANSWER, ANSWER)
    assert (lossless.texts, lossless.equal_texts, lossless.divergences) == (1, 1, [])
    assert finding_of(lossless) is None


def test_a_near_tie_is_allowed_in_bfloat16_only(model: nn.Module, ranked: Tensor) -> None:
    tied = [int(token) for token in ranked[150:152]]  # in the middle of 320, where logits are dense
    bare, drafted = [*ANSWER[:2], tied[0], 1], [*ANSWER[:2], tied[1], 2]
    lossless = compared(model, bare, drafted)
    (divergence,) = lossless.divergences
    assert divergence.position == 2
    assert 0 <= divergence.logit_gap <= lossless.largest_allowed_gap < 1
    assert finding_of(lossless) is None

    lossless = compared(model, bare, drafted, torch.float32)
    assert lossless.largest_allowed_gap == 0
    assert finding_of(lossless) is not None


def test_a_token_that_the_target_would_not_choose_is_an_error(
    model: nn.Module, ranked: Tensor
) -> None:
    best, worst = int(ranked[0]), int(ranked[-1])
    lossless = compared(model, [*ANSWER[:2], best], [*ANSWER[:2], worst])
    assert lossless.divergences[0].logit_gap > lossless.largest_allowed_gap
    finding = finding_of(lossless)
    assert finding is not None
    assert finding.name == "not-lossless"
    assert finding.severity is Severity.ERROR
    assert "token 2" in finding.message


def test_a_text_cut_short_is_an_error(model: nn.Module) -> None:
    assert finding_of(compared(model, ANSWER, ANSWER[:2])) is not None


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_divergence(one: list[int], other: list[int], place: int | None) -> None:
    assert first_divergence(one, other) == place


@pytest.mark.parametrize("value", [0.7, 1.0, 5.0, 16.0, 31.9])
def test_ulp_is_the_distance_to_the_next_number(value: float) -> None:
    at = torch.tensor(value, dtype=torch.bfloat16)
    after = torch.nextafter(at, torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert ulp(float(at), torch.bfloat16) == float(after - at)

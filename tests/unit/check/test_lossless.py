"""A text that speculation changed is found, and a near-tie is not taken for one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leadout.check.lossless import (
    MAX_P_VALUE,
    compare_answers,
    finding_of,
    first_divergence,
    p_value_of_more,
    ulp,
    with_control,
)
from leadout.check.result import Divergence, Lossless
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
    model: nn.Module, bare: list[int], drafted: list[int], rounding: torch.dtype = torch.bfloat16
):
    return compare_answers(
        model, {"a": [PROMPT]}, {"a": [bare]}, {"a": [drafted]}, rounding, PORTION
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


def test_of_a_quantized_target_only_near_ties_are_allowed(ranked: Tensor) -> None:
    exact = tiny_llama()  # computed in float32; what it rounds counts as bfloat16
    tied = [int(token) for token in ranked[150:152]]
    near = compared(exact, [*ANSWER[:2], tied[0]], [*ANSWER[:2], tied[1]])
    assert near.divergences
    assert finding_of(near) is None

    far = compared(exact, [*ANSWER[:2], int(ranked[0])], [*ANSWER[:2], int(ranked[-1])])
    assert finding_of(far) is not None


def test_a_text_cut_short_is_an_error(model: nn.Module) -> None:
    assert finding_of(compared(model, ANSWER, ANSWER[:2])) is not None


def near_ties(changed: int, texts: int = 36) -> Lossless:
    """A comparison in which this many texts differ, all of them at near-ties."""
    tie = Divergence(prompt_set="a", position=2, logit_gap=0.1)
    return Lossless(
        texts=texts,
        equal_texts=texts - changed,
        divergences=[tie] * changed,
        largest_allowed_gap=0.25,
    )


def beside_control(
    model: nn.Module, lossless: Lossless, differing: int, gap_rank: Tensor | None = None
) -> Lossless:
    """With a control in which this many texts differ between batch sizes."""
    first, second = (50, 51) if gap_rank is None else (int(gap_rank[0]), int(gap_rank[-1]))
    bare = [[*ANSWER[:2], first]] * lossless.texts
    again = [[*ANSWER[:2], second]] * differing + bare[differing:]
    prompts = {"a": [PROMPT] * lossless.texts}
    return with_control(lossless, model, prompts, {"a": bare}, {"a": again}, (16, 4))


def test_near_ties_as_frequent_as_in_the_control_are_rounding(model: nn.Module) -> None:
    found = beside_control(model, near_ties(12), 10)
    assert found.control is not None
    assert (found.control.texts, found.control.equal_texts) == (36, 26)
    assert found.control.p_value > 0.3
    assert finding_of(found) is None


def test_more_changed_texts_than_in_the_control_are_noted(model: nn.Module) -> None:
    assert finding_of(near_ties(19)) is None  # nothing to compare with
    found = beside_control(model, near_ties(19), 5)
    assert found.control is not None
    assert found.control.p_value < MAX_P_VALUE
    finding = finding_of(found)
    assert finding is not None
    assert (finding.name, finding.severity) == ("more-near-ties", Severity.NOTE)
    assert "19 of 36" in finding.message
    assert "without speculation 5 of 36" in finding.message


def test_a_gap_that_another_batch_size_causes_too_is_not_an_error(
    model: nn.Module, ranked: Tensor
) -> None:
    best, worst = int(ranked[0]), int(ranked[-1])
    lossless = compared(model, [*ANSWER[:2], best], [*ANSWER[:2], worst])
    assert finding_of(lossless) is not None
    assert finding_of(beside_control(model, lossless, 1, ranked)) is None
    assert finding_of(beside_control(model, lossless, 0)) is not None


def test_p_values_are_those_of_fishers_exact_test() -> None:
    # The classic example of a lady tasting tea: 4 of 4 right, with 4 of each kind.
    assert p_value_of_more(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert p_value_of_more(0, 10, 0, 10) == 1.0
    assert p_value_of_more(3, 10, 3, 10) > 0.5


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

"""Whether speculation leaves greedy text unchanged, except for near-ties that rounding explains.

In float32 the texts must be equal. In lower precision they may differ: a verifying step runs the
same kernels on another number of tokens than a plain step, the last bit of a logit may change, and
where two tokens score almost alike the other one wins. A quantized target counts as lower precision
also in float32, because its kernels may round activations.

The same happens without speculation when the batch size changes. This is the control: plain vLLM
against itself at another batch size, on the same prompts. A significantly larger share of changed
texts is noted, but it is no fault by itself: a step with drafts verifies more tokens at a time than
any batch size of the control.

Each divergence is checked by itself: the target's own logits for the two tokens, computed by the
reference over the text up to there, must not be further apart than rounding explains, unless
the control has a gap of that size too.

What rounding explains: a logit of size s has a resolution of one ulp, `eps * 2^floor(log2 s)`, and
everything before the head is rounded as well. `ULPS` allows for two computations that are each an
ulp or two from the exact logit. Added to it is a measurement: how much the gap between the two
tokens changes when the reference reads the same text in two portions, as a verifying step does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from leadout.check.result import BatchControl, Divergence, Lossless
from leadout.evaluate.hidden_states import ReferenceTarget, as_reference
from leadout.findings import Finding, error, note

ULPS = 4
MAX_P_VALUE = 0.01  # above it, the share of changed texts counts as that of the control
_REMEDY = (
    "Do not deploy: speculation must not change the target's text, whatever the drafter. Serve "
    "without speculation and report the engine's version with this result."
)

ByPrompt = Mapping[str, Sequence[Sequence[int]]]  # by set, prompts or the answers to them


def compare_answers(
    model: nn.Module | ReferenceTarget,
    prompts: ByPrompt,
    bare: ByPrompt,
    speculative: ByPrompt,
    rounding: torch.dtype,
    portion: int,
) -> Lossless:
    """Compare answers with and without speculation.

    `model` is the target in the engine's precision, `rounding` the type whose rounding explains
    differences, `portion` the number of tokens that a step with drafts verifies.
    """
    reference = as_reference(model)
    divergences: list[Divergence] = []
    allowed = 0.0
    for found in _differences(prompts, bare, speculative):
        gap, size = _gap(reference.next_logits(found.before), *found.tokens)
        divergences.append(found.with_gap(gap))
        if rounding != torch.float32:
            in_portions, _ = _gap(reference.next_logits(found.before, portion), *found.tokens)
            allowed = max(allowed, ULPS * ulp(size, rounding) + abs(in_portions - gap))
    texts = sum(len(part) for part in prompts.values())
    return Lossless(
        texts=texts,
        equal_texts=texts - len(divergences),
        divergences=divergences,
        largest_allowed_gap=allowed,
    )


def with_control(
    lossless: Lossless,
    model: nn.Module | ReferenceTarget,
    prompts: ByPrompt,
    bare: ByPrompt,
    bare_again: ByPrompt,
    batches: tuple[int, int],
) -> Lossless:
    """Add the control: two runs without speculation, with this many requests at a time."""
    reference = as_reference(model)
    divergences = [
        found.with_gap(_gap(reference.next_logits(found.before), *found.tokens)[0])
        for found in _differences(prompts, bare, bare_again)
    ]
    texts = sum(len(part) for part in prompts.values())
    control = BatchControl(
        batch=batches[0],
        other_batch=batches[1],
        texts=texts,
        equal_texts=texts - len(divergences),
        divergences=divergences,
        p_value=p_value_of_more(len(lossless.divergences), lossless.texts, len(divergences), texts),
    )
    return lossless.model_copy(update={"control": control})


def p_value_of_more(differing: int, texts: int, differing_control: int, control: int) -> float:
    """Fisher's exact test, one-sided: that the first share is not larger than the second."""
    from scipy import stats

    equal, equal_control = texts - differing, control - differing_control
    counts = np.array([[differing, equal], [differing_control, equal_control]])
    return float(stats.fisher_exact(counts, alternative="greater").pvalue)


def finding_of(lossless: Lossless) -> Finding | None:
    return _beyond_rounding(lossless) or _more_than_control(lossless)


def _beyond_rounding(lossless: Lossless) -> Finding | None:
    """Texts that differ where no rounding and no change of the batch size explains it."""
    allowed, control = lossless.largest_allowed_gap, lossless.control
    in_control = max((each.logit_gap for each in control.divergences), default=0) if control else 0
    explained = max(allowed, in_control)
    bad = [each for each in lossless.divergences if allowed == 0 or each.logit_gap > explained]
    if not bad:
        return None
    worst = max(bad, key=lambda each: each.logit_gap)
    limit = f"at most {explained:.4g} is rounding" if allowed else "in float32 texts must be equal"
    return error(
        "not-lossless",
        f"speculation changes {len(bad)} of {lossless.texts} greedy texts by more than rounding: "
        f"an answer of {worst.prompt_set} diverges at token {worst.position}, where the target's "
        f"logits for the two tokens are {worst.logit_gap:.4g} apart ({limit})",
        _REMEDY,
        texts=lossless.texts,
        changed=len(bad),
        largest_gap=worst.logit_gap,
        allowed_gap=explained,
    )


def _more_than_control(lossless: Lossless) -> Finding | None:
    control = lossless.control
    if control is None or control.p_value >= MAX_P_VALUE:
        return None
    changed, in_control = len(lossless.divergences), len(control.divergences)
    return note(
        "more-near-ties",
        f"speculation changes {changed} of {lossless.texts} greedy texts at near-ties, another "
        f"batch size without speculation {in_control} of {control.texts} (p = "
        f"{control.p_value:.2g}): every change is within rounding",
        "To rule out an error, run the check with --dtype float32: the texts of a target that is "
        "not quantized must then be equal.",
        texts=lossless.texts,
        changed=changed,
        changed_in_control=in_control,
        p_value=control.p_value,
    )


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first place where two answers to one prompt differ."""

    prompt_set: str
    position: int  # in the answer
    before: list[int]  # the prompt and the answer up to there
    tokens: tuple[Sequence[int], Sequence[int]]  # the next token of each; empty if it has ended

    def with_gap(self, gap: float) -> Divergence:
        return Divergence(prompt_set=self.prompt_set, position=self.position, logit_gap=gap)


def _differences(prompts: ByPrompt, answers: ByPrompt, others: ByPrompt) -> Iterator[_Difference]:
    for name, part in prompts.items():
        for prompt, one, other in zip(part, answers[name], others[name], strict=True):
            place = first_divergence(one, other)
            if place is not None:
                tokens = one[place : place + 1], other[place : place + 1]
                yield _Difference(name, place, [*prompt, *one[:place]], tokens)


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two answers differ; an answer that ends earlier differs there."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _gap(logits: Tensor, one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """The gap between the logits [vocab] of the tokens chosen with and without speculation.

    Where one of the texts has ended there is one token only; the gap is then that of all logits.
    The second number is the size of the logits, whose resolution limits the gap.
    """
    of_both = logits[[*one, *other]] if one and other else logits
    # Logits near zero are sums of larger numbers, whose rounding they keep.
    size = max(float(of_both.abs().max()), float(logits.std()))
    return float(of_both.max() - of_both.min()), size


def ulp(value: float, precision: torch.dtype) -> float:
    """The distance between neighbouring numbers of this size."""
    return torch.finfo(precision).eps * 2.0 ** math.floor(math.log2(value))

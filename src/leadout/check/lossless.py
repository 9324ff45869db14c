"""Whether speculation leaves greedy text unchanged, except for near-ties that rounding explains.

In float32 the texts must be equal. In lower precision they may differ: a verifying step runs the
same kernels on another number of tokens than a plain step, the last bit of a logit may change, and
where two tokens score almost alike the other one wins. Each divergence is therefore checked: the
target's own logits for the two tokens, computed by transformers over the text up to there, must
not be further apart than rounding explains.

What rounding explains: a logit of size s has a resolution of one ulp, `eps * 2^floor(log2 s)`, and
everything before the head is rounded as well. `ULPS` allows for two computations that are each an
ulp or two from the exact logit. Added to it is a measurement: how much the gap between the two
tokens changes when transformers reads the same text in two portions, as a verifying step does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leadout.check.result import Divergence, Lossless
from leadout.findings import Finding, error

ULPS = 4

ByPrompt = Mapping[str, Sequence[Sequence[int]]]  # by set, prompts or the answers to them


def compare_answers(
    model: nn.Module,
    prompts: ByPrompt,
    bare: ByPrompt,
    speculative: ByPrompt,
    precision: torch.dtype,
    portion: int,
) -> Lossless:
    """Compare answers with and without speculation.

    `model` is the target in transformers in the engine's precision, `portion` the number of tokens
    that a step with drafts verifies.
    """
    texts = 0
    divergences: list[Divergence] = []
    allowed = 0.0
    for name, part in prompts.items():
        for prompt, without, drafted in zip(part, bare[name], speculative[name], strict=True):
            texts += 1
            place = first_divergence(without, drafted)
            if place is None:
                continue
            tokens = without[place : place + 1], drafted[place : place + 1]
            text = [*prompt, *without[:place]]
            gap, size = _gap(_next_logits(model, text), *tokens)
            divergences.append(Divergence(prompt_set=name, position=place, logit_gap=gap))
            if precision != torch.float32:
                in_portions, _ = _gap(_next_logits(model, text, portion), *tokens)
                rounding = ULPS * ulp(size, precision) + abs(in_portions - gap)
                allowed = max(allowed, rounding)
    return Lossless(
        texts=texts,
        equal_texts=texts - len(divergences),
        divergences=divergences,
        largest_allowed_gap=allowed,
    )


def finding_of(lossless: Lossless) -> Finding | None:
    allowed = lossless.largest_allowed_gap
    bad = [each for each in lossless.divergences if allowed == 0 or each.logit_gap > allowed]
    if not bad:
        return None
    worst = max(bad, key=lambda each: each.logit_gap)
    limit = f"at most {allowed:.4g} is rounding" if allowed else "in float32 texts must be equal"
    return error(
        "not-lossless",
        f"speculation changes {len(bad)} of {lossless.texts} greedy texts by more than rounding: "
        f"an answer of {worst.prompt_set} diverges at token {worst.position}, where the target's "
        f"logits for the two tokens are {worst.logit_gap:.4g} apart ({limit})",
        "Do not deploy: speculation must not change the target's text, whatever the drafter. "
        "Serve without speculation and report the engine's version with this result.",
        texts=lossless.texts,
        changed=len(bad),
        largest_gap=worst.logit_gap,
        allowed_gap=allowed,
    )


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


def _next_logits(model: nn.Module, tokens: Sequence[int], last_portion: int = 0) -> Tensor:
    """Logits [vocab] of the token after a text, which is read at once or in two portions."""
    text = torch.tensor([list(tokens)])
    before, rest = text[:, :-last_portion], text[:, -last_portion:]
    past: Any = None
    with torch.no_grad():
        if 0 < before.shape[1] < text.shape[1]:
            past = model(input_ids=before, use_cache=True, logits_to_keep=1).past_key_values
        output = model(
            input_ids=text if past is None else rest, past_key_values=past, logits_to_keep=1
        )
    logits: Tensor = output.logits[0, -1].float()
    return logits

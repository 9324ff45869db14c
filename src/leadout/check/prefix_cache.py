"""Whether acceptance is the same when a part of the prompt comes from vLLM's prefix cache.

The drafter reads states of the target for every token of the context. If the engine does not keep
what the drafter made of a cached token, drafts after a cache hit are made without that context, and
acceptance drops while the text stays the same. So the same prompts are served twice, first with an
empty cache, and the two runs are compared text by text. A text counts only if vLLM reports more
cached tokens for it the second time, and only up to the first token that differs between the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from leadout.check.lossless import ByPrompt, first_divergence
from leadout.check.result import PrefixCache
from leadout.engine.offline import SetRun
from leadout.findings import Finding, Severity, finding
from leadout.stats import bootstrap

# A ratio of acceptance lengths whose whole interval is below this is reported.
MIN_RATIO = 0.95
# Below this the drafter hardly works after a cache hit.
MIN_USABLE_RATIO = 0.75
MIN_TEXTS = 3  # for an interval over texts


@dataclass(frozen=True, slots=True)
class _Pair:
    """One text in both runs, up to the first token that differs."""

    prompt_tokens: int
    cached_tokens: int
    cold: tuple[int, int]  # tokens and steps
    warm: tuple[int, int]


def compare(prompts: ByPrompt, cold: Sequence[SetRun], warm: Sequence[SetRun]) -> PrefixCache:
    """Compare two runs of the prompts; the second one may lack sets that cannot be cached."""
    pairs = list(_pairs(prompts, cold, warm))
    total = sum(len(part) for part in prompts.values())
    # [texts] each
    tokens, steps = (np.array([p.cold[i] for p in pairs], dtype=np.float64) for i in (0, 1))
    warm_tokens, warm_steps = (
        np.array([p.warm[i] for p in pairs], dtype=np.float64) for i in (0, 1)
    )

    def lengths(drawn: np.ndarray, of: np.ndarray, over: np.ndarray) -> np.ndarray:
        found: np.ndarray = of[drawn].sum(-1) / np.maximum(over[drawn].sum(-1), 1)
        return found

    everything = np.arange(len(pairs))
    ratio = None
    if len(pairs) >= MIN_TEXTS:
        ratio = bootstrap(
            len(pairs),
            lambda drawn: lengths(drawn, warm_tokens, warm_steps) / lengths(drawn, tokens, steps),
        )
    return PrefixCache(
        texts=len(pairs),
        other_texts=total - len(pairs),
        prompt_tokens=sum(pair.prompt_tokens for pair in pairs),
        cached_tokens=sum(pair.cached_tokens for pair in pairs),
        cold=float(lengths(everything, tokens, steps)),
        warm=float(lengths(everything, warm_tokens, warm_steps)),
        ratio=ratio,
    )


def _pairs(prompts: ByPrompt, cold: Sequence[SetRun], warm: Sequence[SetRun]) -> Iterator[_Pair]:
    first = {run.prompt_set: run for run in cold}
    for after in warm:
        before = first[after.prompt_set]
        for place, prompt in enumerate(prompts[after.prompt_set]):
            gained = after.cached_tokens[place] - before.cached_tokens[place]
            answers = before.answers[place], after.answers[place]
            differs = first_divergence(*answers)
            common = len(answers[0]) if differs is None else differs
            pair = _Pair(
                len(prompt),
                gained,
                tokens_and_steps(before.by_step[place], common),
                tokens_and_steps(after.by_step[place], common),
            )
            if gained > 0 and pair.cold[1] and pair.warm[1]:
                yield pair


def tokens_and_steps(by_step: Sequence[int], end: int) -> tuple[int, int]:
    """Tokens and steps after that of the prompt which lie before position `end` of the answer."""
    position, steps = by_step[0] if by_step else 0, 0
    for count in by_step[1:]:
        if position + count > end:
            break
        position += count
        steps += 1
    return position - (by_step[0] if by_step else 0), steps


def finding_of(found: PrefixCache) -> Finding | None:
    if found.ratio is None or found.ratio.high >= MIN_RATIO:
        return None
    return finding(
        Severity.ERROR if found.ratio.high < MIN_USABLE_RATIO else Severity.WARNING,
        "prefix-cache",
        f"the acceptance length of {found.texts} texts is {found.warm:.3f} with a warm prefix "
        f"cache, but {found.cold:.3f} with an empty one (ratio {found.ratio:.3f})",
        "Serve with --no-enable-prefix-caching, and report the engine's version with this result.",
        texts=found.texts,
        cold=found.cold,
        warm=found.warm,
        ratio=found.ratio.value,
        ratio_low=found.ratio.low,
        ratio_high=found.ratio.high,
    )


def describe(found: PrefixCache) -> str:
    if found.ratio is None:
        return (
            f"not applicable, because vLLM took a part of only {found.texts} of "
            f"{found.texts + found.other_texts} prompts from its cache (at least {MIN_TEXTS} are "
            "needed)"
        )
    return (
        f"the acceptance length of {found.texts} texts is {found.warm:.2f} with "
        f"{found.cached_tokens / found.prompt_tokens:.0%} of their prompts in the cache and "
        f"{found.cold:.2f} with an empty cache, up to where they differ: ratio {found.ratio:.2f}"
    )

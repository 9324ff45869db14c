"""Acceptance in long contexts: the same tasks behind more and more unrelated text, served by vLLM.

A drafter that was trained on short texts, or whose rotary positions or attention window are wrong,
gets fewer drafts accepted the longer the context is. The tasks are equal at every length, so the
ratio between the longest and the shortest context is paired by task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from leadout.check.prefix_cache import tokens_and_steps
from leadout.check.result import ContextLength, LongContext
from leadout.dflash.config import DrafterConfig
from leadout.engine.offline import SetRun
from leadout.findings import Finding, warning
from leadout.stats import Floats, Indices, bootstrap, ratio_interval

MIN_LIMIT = 512  # in shorter engines there is no long context
PARTS = (8, 3, 1)  # contexts are these parts of the longest; few, because they take time to read
MIN_RATIO = 0.8  # a ratio of acceptance lengths whose whole interval is below this is reported
TASKS = 5


def context_limit(asked: int, drafter: DrafterConfig, target_positions: int | None) -> int:
    """The longest context to measure, answer included; 0 if there is none worth measuring."""
    limit = min(asked, drafter.max_positions, target_positions or asked)
    return limit if limit >= MIN_LIMIT else 0


def context_lengths(limit: int, reserved: int) -> list[int]:
    """Lengths of prompts, ascending; `reserved` tokens of the limit are for answer and drafts."""
    longest = limit - reserved
    return [longest // part for part in PARTS]


def set_name(length: int) -> str:
    """The prompt set with contexts of this length."""
    return f"context of {length}"


def compare(
    runs: Sequence[SetRun],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    drafter: DrafterConfig,
    target_positions: int | None,
    limit: int,
) -> LongContext:
    """Acceptance by context; `runs` have the shortest contexts first and equal tasks."""
    counts = [_tokens_and_steps(run) for run in runs]  # each [2, tasks]
    first, last = counts[0], counts[-1]

    def ratio(drawn: Indices) -> Floats:
        quotient: Floats = _lengths(last, drawn) / _lengths(first, drawn)
        return quotient

    windows = [layer.window for layer in drafter.layers if layer.window is not None]
    return LongContext(
        limit=limit,
        drafter_positions=drafter.max_positions,
        target_positions=target_positions,
        window=min(windows, default=None),
        contexts=[
            ContextLength(
                tokens=max(len(prompt) for prompt in prompts[run.prompt_set]),
                texts=len(run.answers),
                length=ratio_interval(*each),
            )
            for run, each in zip(runs, counts, strict=True)
        ],
        ratio=bootstrap(first.shape[1], ratio),
    )


def _tokens_and_steps(run: SetRun) -> Floats:
    found = [
        tokens_and_steps(steps, len(answer))
        for steps, answer in zip(run.by_step, run.answers, strict=True)
    ]
    return np.array(found, dtype=np.float64).T


def _lengths(counts: Floats, drawn: Indices) -> Floats:
    tokens, steps = counts
    # An answer may end with its first token; a length is at least 1 where there is a step.
    found: Floats = np.maximum(tokens[drawn].sum(-1), 1) / np.maximum(steps[drawn].sum(-1), 1)
    return found


def finding_of(found: LongContext) -> Finding | None:
    if found.ratio.high >= MIN_RATIO:
        return None
    shortest, longest = found.contexts[0], found.contexts[-1]
    return warning(
        "long-context",
        f"the acceptance length is {longest.length:.3f} after {longest.tokens} tokens but "
        f"{shortest.length:.3f} after {shortest.tokens} on the same tasks (ratio "
        f"{found.ratio:.3f}, expected at least {MIN_RATIO})",
        "Train the drafter on longer text (`leadout data --max-length`), or serve requests of this "
        "length without drafts.",
        ratio=found.ratio.value,
        ratio_low=found.ratio.low,
        ratio_high=found.ratio.high,
        tokens=longest.tokens,
    )


def describe(found: LongContext) -> str:
    lengths = ", ".join(f"{each.length:.2f} after {each.tokens} tokens" for each in found.contexts)
    return (
        f"acceptance length {lengths}; longest against shortest on the same "
        f"{found.contexts[0].texts} tasks: ratio {found.ratio:.2f}. {describe_limits(found)}"
    )


def describe_limits(found: LongContext) -> str:
    target = "unknown" if found.target_positions is None else f"{found.target_positions}"
    window = "none" if found.window is None else f"{found.window}"
    return (
        f"Measured up to {found.limit} tokens; positions of the target: {target}, of the drafter: "
        f"{found.drafter_positions}, attention window of the drafter: {window}"
    )

"""Power of `leadout check`: how often it errs on a healthy pair, and how often it finds a drop.

    python experiments/check_power.py TARGET --out results/check/power.json
    python experiments/check_power.py --figures FILE --out results/check/power.json

The default prompts are answered once by vLLM, and the drafter and some of the changes that a check
tries are measured on these texts at the positions that a check uses. All else is resampling: texts
are drawn with replacement within their sets, and the functions of the check decide. The second form
repeats the decisions with the figures in the FILE of an earlier run, without an engine.

A drop is made from the measured counts. Each accepted draft is rejected with a probability that
differs from text to text (exponentially distributed around its mean), and the texts are decoded
again along the shortened counts. The mean is chosen so that the expected acceptance length falls by
`DROP`. False alarms of the comparison: two copies with the same expected drop are compared.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import SHIPPED, provenance, write_result
from leadout.check.baseline import baseline_findings
from leadout.check.diagnosis import (
    POSITION_STRIDE,
    Probe,
    Text,
    as_served,
    cause_findings,
    drafter_of,
    half_width,
    layers_needed,
    offline_table,
    precision_findings,
    served_weights,
)
from leadout.check.hypotheses import TargetInfo, Variant, variants_of
from leadout.check.report import verdict_text
from leadout.check.result import CheckResult, Verdict
from leadout.check.run import MAX_PROMPT, MAX_TOKENS, mask_candidates
from leadout.check.trials import screen_and_test
from leadout.checkpoints import read_checkpoint
from leadout.data.chat import Chat
from leadout.evaluate.acceptance import Gain, TextAcceptance, along_decoding, gain_of_sums
from leadout.evaluate.hidden_states import load_model
from leadout.evaluate.prompts import check_prompts
from leadout.pairing import read_target

PRECISION = torch.float32  # not every CPU computes in bfloat16
REPETITIONS = 40
DROP = 0.05
FEW_PROMPTS = 3
CALIBRATION_DRAWS = 20
CHANGES = 12  # of those that a check tries, evenly spaced: each takes half a minute

Figures = dict[str, Any]  # what is measured once: "draft_tokens", "changes" and "texts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--drafter", type=Path, default=SHIPPED)
    parser.add_argument("--figures", type=Path, help="a result of an earlier run")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.figures is not None:
        earlier = json.loads(arguments.figures.read_text())
        figures: Figures = {"provenance": earlier["provenance"], **earlier["figures"]}
    else:
        figures = measure(arguments.target, arguments.drafter)
        # Kept if something fails below.
        made = provenance(target=arguments.target, drafter=arguments.drafter)
        write_result(arguments.out, {"provenance": made, "figures": figures})
    repeated = Repetitions(figures, arguments.drafter).run()
    folders = {"target": arguments.target, "drafter": arguments.drafter}
    made = provenance(**{role: each for role, each in folders.items() if each is not None})
    write_result(arguments.out, {"provenance": made, **repeated, "figures": figures})


# What is measured once


def measure(target: Path, drafter: Path) -> Figures:
    from leadout.engine.offline import SessionRequest, run_session

    checkpoint, facts = read_checkpoint(drafter), read_target(target)
    draft_tokens = checkpoint.config.max_draft_tokens
    prompts = check_prompts((), Chat(target), MAX_PROMPT)
    longest = max(len(prompt) for part in prompts.values() for prompt in part)
    request = SessionRequest(
        target=str(target),
        prompts=prompts,
        max_tokens=MAX_TOKENS,
        max_length=longest + MAX_TOKENS + draft_tokens,
        dtype=str(PRECISION).removeprefix("torch."),
    )
    runs = run_session(request, lambda _: None).runs
    texts = [
        Text(run.prompt_set, prompt, answer)
        for run in runs
        for prompt, answer in zip(prompts[run.prompt_set], run.answers, strict=True)
        if len(answer) > draft_tokens
    ]
    layers = layers_needed(checkpoint.config, facts.num_layers)
    probe = Probe(target, load_model(target, PRECISION), texts, layers, PRECISION)
    config = as_served(checkpoint.config, draft_tokens)
    weights = served_weights(checkpoint, PRECISION)
    masks = mask_candidates(target, facts.vocab_size)
    info = TargetInfo(facts.num_layers, facts.rope, masks, probe.longest)
    every = variants_of(config, info)
    variants = [every[i * len(every) // CHANGES] for i in range(CHANGES)]
    accepted = []
    for variant in variants:
        changed = weights if variant.weights is None else variant.weights(weights)
        counts = probe.counts(
            drafter_of(variant.config, changed),
            normed_last_tap=variant.normed_last_tap,
            position_stride=POSITION_STRIDE,
        )
        accepted.append([int(each.sum()) for each in counts])
    return {
        "draft_tokens": draft_tokens,
        "changes_in_a_check": len(every),
        "changes": [
            {
                "cause": variant.cause,
                "edit": variant.edit,
                "may_be_intended": variant.may_be_intended,
                "accepted": " ".join(map(str, of_texts)),  # by text
            }
            for variant, of_texts in zip(variants, accepted, strict=True)
        ],
        "texts": [
            {
                "prompt_set": text.prompt_set,
                "prompt": text.prompt,
                "prompt_length": text.prompt_length,
                "accepted": " ".join(map(str, text.at_positions.tolist())),  # by position
            }
            for text in probe.acceptance(drafter_of(config, weights))
        ],
    }


# What is repeated


class Repetitions:
    def __init__(self, figures: Figures, drafter: Path) -> None:
        self._draft_tokens: int = figures["draft_tokens"]
        config = read_checkpoint(drafter).config
        self._texts = [
            text_of(
                each["prompt_set"],
                each["prompt_length"],
                torch.tensor([int(count) for count in each["accepted"].split()]),
                each["prompt"],
            )
            for each in figures["texts"]
        ]
        self._after = {
            Variant(
                each["cause"], each["edit"], config, may_be_intended=each["may_be_intended"]
            ): np.array(each["accepted"].split(), dtype=np.float64)
            for each in figures["changes"]
        }
        self._sets = list(dict.fromkeys(text.prompt_set for text in self._texts))

    def run(self) -> dict[str, Any]:
        everything = range(len(self._texts))
        whole = self._checked(everything)
        assert whole.offline is not None
        rejection = self._rejection()
        verdicts: Counter[str] = Counter()
        few: Counter[str] = Counter()
        drops: list[float] = []
        widths: list[float] = []
        found = false = 0
        for seed in range(REPETITIONS):
            draw = np.random.default_rng(seed)
            drawn = self._resampled(draw)
            before = self._checked(drawn)
            assert before.offline is not None
            verdicts[verdict_text(before)] += 1
            widths.append(half_width(before.offline.overall.length))
            worse, same = (self._degraded(drawn, rejection, draw) for _ in range(2))
            assert worse.offline is not None
            lengths = [each.overall.length.value for each in (worse.offline, before.offline)]
            drops.append(1 - lengths[0] / lengths[1])
            found += has_dropped(worse, before)
            false += has_dropped(worse, same)
            few_texts = sorted(draw.choice(len(self._texts), FEW_PROMPTS, replace=False).tolist())
            few[verdict_text(self._checked(few_texts))] += 1
        length = whole.offline.overall.length
        return {
            "repetitions": REPETITIONS,
            "prompts": len(self._texts),
            "acceptance_length": length.model_dump(),
            "half_width": half_width(length),
            "largest_half_width": max(widths),
            "verdict": verdict_text(whole),
            "healthy_verdicts": dict(verdicts),
            "healthy_unfit": verdicts[Verdict.UNFIT.value],
            "drop": DROP,
            "mean_drop": float(np.mean(drops)),
            "drop_found": found,
            "false_drops": false,
            "few_prompts": FEW_PROMPTS,
            "few_prompts_verdicts": dict(few),
        }

    def _resampled(self, draw: np.random.Generator) -> list[int]:
        """As many texts of each set as there are, with replacement, in the order of the sets."""
        found: list[int] = []
        for name in self._sets:
            own = [i for i, text in enumerate(self._texts) if text.prompt_set == name]
            found += sorted(draw.choice(own, len(own)).tolist())
        return found

    def _checked(self, drawn: Sequence[int]) -> CheckResult:
        """The decisions of a check on these texts."""
        texts = [self._texts[i] for i in drawn]
        counts = [text.at_positions[::POSITION_STRIDE] for text in texts]
        before = np.array([each.sum().item() for each in counts], dtype=np.float64)
        sizes = np.array([len(each) for each in counts], dtype=np.float64)

        def gain_on(variant: Variant, chosen: Sequence[int]) -> Gain:
            after = self._after[variant][[drawn[i] for i in chosen]]
            return gain_of_sums(before[list(chosen)], after, sizes[list(chosen)])

        trials = screen_and_test(list(self._after), gain_on, len(texts))
        result = self._result(texts)
        assert result.offline is not None
        overall, sets = result.offline.overall, len(result.offline.by_set)
        findings = [*cause_findings(trials, overall), *precision_findings(overall, sets, None)]
        return result.judged(findings)

    def _degraded(
        self, drawn: Sequence[int], rejection: float, draw: np.random.Generator
    ) -> CheckResult:
        return self._result([degraded(self._texts[i], rejection, draw) for i in drawn])

    def _result(self, texts: Sequence[TextAcceptance]) -> CheckResult:
        """A text that was drawn twice counts as two prompts."""
        numbered = [
            text_of(text.prompt_set, text.prompt_length, text.at_positions, f"{place}")
            for place, text in enumerate(texts)
        ]
        return CheckResult(
            target="smollm2",
            drafter=SHIPPED.name,
            static_only=False,
            verdict=Verdict.FIT,
            findings=[],
            draft_tokens=self._draft_tokens,
            offline=offline_table(numbered, self._draft_tokens),
        )

    def _rejection(self) -> float:
        """The mean probability to reject an accepted draft that lowers acceptance by `DROP`."""

        def length(rejection: float) -> float:
            draw = np.random.default_rng(0)
            texts = [
                degraded(text, rejection, draw)
                for _ in range(CALIBRATION_DRAWS)
                for text in self._texts
            ]
            steps = [count for text in texts for count in text.at_steps]
            return 1 + sum(steps) / len(steps)

        low, high, expected = 0.0, 0.5, (1 - DROP) * length(0.0)
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle) > expected else (low, middle)
        return (low + high) / 2


def text_of(prompt_set: str, length: int, counts: torch.Tensor, prompt: str) -> TextAcceptance:
    return TextAcceptance(prompt_set, length, counts, along_decoding(counts), prompt)


def degraded(text: TextAcceptance, mean: float, draw: np.random.Generator) -> TextAcceptance:
    """Accepted drafts [positions], each rejected with a probability of its own text."""
    rejection = min(float(draw.exponential(mean)), 0.99) if mean > 0 else 0.0
    counts = text.at_positions.numpy()
    # The number of drafts before the first rejection is geometric.
    before_rejection = draw.geometric(rejection, len(counts)) - 1 if rejection > 0 else counts
    shortened = torch.from_numpy(np.minimum(counts, before_rejection))
    return text_of(text.prompt_set, text.prompt_length, shortened, text.prompt)


def has_dropped(new: CheckResult, old: CheckResult) -> bool:
    return any(each.name == "dropped-since-baseline" for each in baseline_findings(new, old))


if __name__ == "__main__":
    main()

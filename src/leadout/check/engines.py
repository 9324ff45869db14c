"""All that a check asks of vLLM, in two starts: once with the drafter, once without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from leadout.check.result import ServedAcceptance
from leadout.check.served import acceptance_of
from leadout.engine.apart import Report
from leadout.engine.recorded import RecordedText, read_texts
from leadout.engine.session import Recording, SessionRequest, SetRun, run_session_apart

Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids by set
Answers = dict[str, list[list[int]]]  # to every prompt of every set

GREEDY, SAMPLED = 0.0, 1.0
# A drafter that is computed wrongly is so in every block; a few show it.
RECORDED_PROMPTS, RECORDED_BLOCKS = 4, 3


@dataclass(frozen=True, slots=True)
class EngineRuns:
    bare: Answers  # greedy, without the drafter
    speculative: Answers  # greedy, with it
    served: list[ServedAcceptance]  # greedy, then sampled
    recorded: list[RecordedText]


def run_engines(
    target: Path,
    drafter: Path,
    prompts: Prompts,
    *,
    max_tokens: int,
    draft_tokens: int,
    max_length: int,
    dtype: torch.dtype,
    bare_only: Prompts | None = None,
    report: Report = lambda _: None,
) -> EngineRuns:
    """Each engine in a process of its own; `report` hears what has been done.

    `bare_only` are prompts that only the target alone answers.
    """
    with TemporaryDirectory(prefix="leadout-check-") as folder:
        path = Path(folder) / "drafts.safetensors"
        alone = SessionRequest(
            target=str(target),
            prompts=_lists(prompts),
            max_tokens=max_tokens,
            max_length=max_length,
            dtype=str(dtype).removeprefix("torch."),
        )
        together = alone.model_copy(
            update={
                "drafter": str(drafter),
                "draft_tokens": draft_tokens,
                "temperatures": [GREEDY, SAMPLED],
                "recording": Recording(
                    prompts=_some_of_each(prompts), blocks=RECORDED_BLOCKS, path=path
                ),
            }
        )
        speculative = run_session_apart(together, lambda done: report(f"with drafter: {done}"))
        recorded = read_texts(path)
    alone = alone.model_copy(update={"prompts": _lists({**prompts, **(bare_only or {})})})
    bare = run_session_apart(alone, lambda done: report(f"without drafter: {done}"))
    return EngineRuns(
        bare=_greedy_answers(bare.runs),
        speculative=_greedy_answers(speculative.runs),
        served=acceptance_of(speculative.runs),
        recorded=recorded,
    )


def _lists(prompts: Prompts) -> Answers:
    return {name: [list(each) for each in asked] for name, asked in prompts.items()}


def _some_of_each(prompts: Prompts) -> list[list[int]]:
    """The first prompt of every set, then the second, as far as wanted."""
    by_turns = chain.from_iterable(zip_longest(*prompts.values()))
    found = (list(prompt) for prompt in by_turns if prompt is not None)
    return list(islice(found, RECORDED_PROMPTS))


def _greedy_answers(runs: Sequence[SetRun]) -> Answers:
    return {run.prompt_set: run.answers for run in runs if run.temperature == GREEDY}

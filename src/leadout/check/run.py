"""All that a check asks of vLLM, in two starts: once with the drafter, once without."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from leadout.check import lossless, parity
from leadout.check.baseline import compared, read_baseline
from leadout.check.diagnosis import (
    Examination,
    examine,
    make_probe,
    mode_findings,
    other_modes,
    write_fixed,
)
from leadout.check.probe import Text
from leadout.check.result import (
    CheckError,
    CheckRequest,
    CheckResult,
    Finding,
    Gravity,
    OfflineAcceptance,
    Progress,
    ServedAcceptance,
    acceptance_of,
    by_weight,
    verdict_of,
)
from leadout.check.static import served_dtype, static_findings
from leadout.check.target_files import read_token_files
from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.data.chat import Chat
from leadout.engine.child_process import Report
from leadout.engine.draft_recorder import RecordedText, read_texts
from leadout.engine.offline import Recording, SessionRequest, SetRun, run_session
from leadout.evaluate.hidden_states import load_model
from leadout.evaluate.prompts import check_prompts
from leadout.models import local_folder
from leadout.pairing import TargetFacts, read_target
from leadout.version import installed_versions

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
        speculative = run_session(together, lambda done: report(f"with drafter: {done}"))
        recorded = read_texts(path)
    alone = alone.model_copy(update={"prompts": _lists({**prompts, **(bare_only or {})})})
    bare = run_session(alone, lambda done: report(f"without drafter: {done}"))
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


# `leadout check` as a function: files, then engine and reference on the same prompts.

MAX_TOKENS = 96
MAX_PROMPT = 1200
LARGEST_DIFFERENCE = 0.05  # between offline and served acceptance length
MOST_MASK_CANDIDATES = 12


def check(request: CheckRequest, progress: Progress) -> CheckResult:
    began = time.monotonic()
    target, drafter = local_folder(request.target), local_folder(request.drafter)
    result = CheckResult(
        target=request.target,
        drafter=request.drafter,
        static_only=request.static_only,
        verdict=verdict_of([]),
        findings=static_findings(
            target,
            drafter,
            target_name=request.target,
            draft_tokens=request.draft_tokens,
            dtype=request.dtype,
            thinking=request.thinking,
        ),
        versions=installed_versions(),
        date=datetime.now(UTC).date().isoformat(),
    )
    # What the files refuse already would not start; there is nothing to measure then.
    if not request.static_only and not any(f.gravity is Gravity.UNFIT for f in result.findings):
        result = _measured(result, Pairing(target, drafter, request), progress)
    if request.baseline is not None:
        result = compared(result, read_baseline(request.baseline))
    findings = by_weight(result.findings)
    return result.model_copy(
        update={
            "findings": findings,
            "verdict": verdict_of(findings),
            "seconds": time.monotonic() - began,
        }
    )


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pair under check, as folders."""

    target: Path
    drafter: Path
    request: CheckRequest

    @property
    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.drafter)

    @property
    def facts(self) -> TargetFacts:
        return read_target(self.target, self.request.target)


def _measured(result: CheckResult, pair: Pairing, progress: Progress) -> CheckResult:
    checkpoint, facts, request = pair.checkpoint, pair.facts, pair.request
    draft_tokens = request.draft_tokens or checkpoint.config.max_draft_tokens
    longest = min(facts.max_positions or MAX_PROMPT, checkpoint.config.max_positions)
    most = min(longest - MAX_TOKENS - draft_tokens, MAX_PROMPT)
    chat = Chat(pair.target, request.thinking)
    prompts = check_prompts(request.prompts, chat, most)
    if not any(prompts.values()):
        raise CheckError(
            f"--prompts: found none of at most {most} tokens, wanted some; give shorter ones"
        )
    modes = other_modes(request.prompts, pair.target, chat, most)
    longest_prompt = max(len(prompt) for part in prompts.values() for prompt in part)
    precision: torch.dtype = getattr(torch, served_dtype(pair.target, request.dtype))
    runs = run_engines(
        pair.target,
        pair.drafter,
        prompts,
        max_tokens=MAX_TOKENS,
        draft_tokens=draft_tokens,
        max_length=longest_prompt + MAX_TOKENS + draft_tokens,
        dtype=precision,
        bare_only=modes,
        report=_reporter(progress, 3 + 3 * len(prompts) + len(modes)),
    )
    model = load_model(pair.target, precision)
    done = progress.stage("engine against reference", 2)
    same_drafts = parity.compare(pair.target, pair.drafter, model, runs.recorded, precision)
    done()
    same_texts = lossless.compare_answers(
        model, prompts, runs.bare, runs.speculative, precision, draft_tokens + 1
    )
    done()
    answered = _texts(prompts, runs.bare)
    texts = [t for part in answered.values() for t in part if len(t.answer) > draft_tokens]
    probe = make_probe(pair.target, model, facts, checkpoint.config, texts, precision, progress)
    masks = mask_candidates(pair.target, facts.vocab_size)
    found = examine(probe, facts, checkpoint, draft_tokens, masks, precision, progress)
    proofs = (lossless.finding_of(same_texts), parity.finding_of(same_drafts))
    findings = [
        *result.findings,
        *(finding for finding in proofs if finding is not None),
        *found.findings,
        *mode_findings(
            pair.target,
            model,
            checkpoint,
            draft_tokens,
            _texts(modes, runs.bare),
            found.offline,
            precision,
        ),
        *served_findings(found.offline, runs.served[0]),
    ]
    if request.fix is not None:
        findings.append(_fixed(pair, found, request.fix))
    return result.model_copy(
        update={
            "findings": findings,
            "draft_tokens": draft_tokens,
            "offline": found.offline,
            "served": runs.served,
            "parity": same_drafts,
            "lossless": same_texts,
            "tried": found.tried,
        }
    )


def _reporter(progress: Progress, pieces: int) -> Callable[[str], None]:
    step = progress.stage("vLLM with and without the drafter", pieces)
    return lambda done: step()


def _texts(prompts: Prompts, answers: Answers) -> dict[str, list[Text]]:
    return {
        name: [Text(name, *pair) for pair in zip(part, answers[name], strict=True)]
        for name, part in prompts.items()
    }


def mask_candidates(target: Path, vocab_size: int) -> list[int]:
    """Tokens that a trainer may have taken for the mask: special ones, and the first free row."""
    files = read_token_files(target, [])
    if files is None:
        return []
    special = sorted({*files.special, *files.roles})
    free = [number for number in (max(files.tokens, default=-1) + 1,) if number < vocab_size]
    return [*free, *special][:MOST_MASK_CANDIDATES]


def served_findings(offline: OfflineAcceptance, served: ServedAcceptance) -> list[Finding]:
    """One definition on both sides, so the numbers must be near each other."""
    expected = offline.overall.length.value
    difference = served.length / expected - 1
    if abs(difference) <= LARGEST_DIFFERENCE:
        return []
    return [
        Finding(
            name="served-differs",
            gravity=Gravity.UNFIT if difference < 0 else Gravity.DOUBTFUL,
            message=(
                f"vLLM serves an acceptance length of {served.length:.3f}, the reference has "
                f"{expected:.3f} on the same prompts ({difference:+.1%}), wanted at most "
                f"{LARGEST_DIFFERENCE:.0%} between them"
            ),
            evidence={"served": served.length, "offline": expected},
            remedy="Engine and drafter do not compute the same; see what parity says.",
        )
    ]


def _fixed(pair: Pairing, found: Examination, out: Path) -> Finding:
    if found.repair is None:
        return Finding(
            name="nothing-to-fix",
            gravity=Gravity.NOTE,
            message=f"--fix {out}: found no edit that raises acceptance, so nothing was written",
            remedy="None needed.",
        )
    write_fixed(pair.drafter, found.repair, out, pair.facts.num_layers)
    return Finding(
        name="fixed",
        gravity=Gravity.NOTE,
        message=f"wrote {out} with the edit: {found.repair.edit}",
        remedy=f"Check it again: leadout check {pair.request.target} {out}",
    )

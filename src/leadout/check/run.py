"""`leadout check` as a function: files first, then the engine and the reference on one prompt set.

vLLM is started twice, each time in a process of its own: with the drafter and without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from leadout.check import long_context, lossless, parity, prefix_cache
from leadout.check.baseline import baseline_findings, read_baseline, require_same_pair
from leadout.check.diagnosis import (
    MAX_HALF_WIDTH,
    Probe,
    Text,
    diagnose,
    half_width,
    layers_needed,
    mode_findings,
    other_modes,
    precision_findings,
    write_repaired,
)
from leadout.check.page import page
from leadout.check.payoff import payoff, read_costs
from leadout.check.result import (
    CheckError,
    CheckResult,
    OfflineAcceptance,
    PrefixCache,
    ServedAcceptance,
    verdict_of,
)
from leadout.check.settings import CheckSettings
from leadout.check.static import served_dtype, static_findings
from leadout.check.tokenizer import read_token_files
from leadout.checkpoints import read_checkpoint
from leadout.checkpoints.store import refuse_existing
from leadout.console import Progress
from leadout.data.chat import Chat
from leadout.engine.draft_recorder import RecordedText, read_texts
from leadout.engine.offline import (
    SESSION_CONCURRENCY,
    SESSION_SETTINGS,
    Pass,
    Recording,
    SessionRequest,
    SetRun,
    can_record,
    run_session,
)
from leadout.engine.vllm_flags import engine_arguments
from leadout.evaluate.prompts import check_prompts, tasks_in_context, without_seen
from leadout.evaluate.reference import reference_device, reference_target, rounding_of
from leadout.files import FileError, require_writable, write_text
from leadout.findings import Finding, Severity, finding, note
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_target
from leadout.provenance import Provenance, RunStart
from leadout.version import installed_versions

NO_PARITY = note(
    "no-parity",
    "drafts were not compared tensor by tensor, as the engine runs in several workers",
    "To compare them, check once on a single device. Acceptance was compared all the same.",
)
TokensBySet = dict[str, list[list[int]]]  # token ids of prompts, or of the answers to them

GREEDY = Pass()
WARM = Pass(name="warm prefix cache", warm=True)
SAMPLED = Pass(name="sampled", temperature=1.0)
LONG = Pass(name="long contexts")
CONTROL_BATCH = 4
CONTROL = Pass(name="another batch size", batch=CONTROL_BATCH)  # without the drafter
MAX_TOKENS = 96  # of an answer
MAX_PROMPT = 1200
MAX_MASK_CANDIDATES = 12
MAX_SERVED_DIFFERENCE = 0.05  # between offline and served acceptance length
# A drafter that is computed wrongly is wrong in every block; a few blocks show it.
RECORDED_PROMPTS, RECORDED_BLOCKS = 4, 3


def check(settings: CheckSettings, progress: Progress | None = None) -> CheckResult:
    """Check a pair, and write the report, the result and the repair that the settings ask for."""
    _require_outputs(settings)
    if settings.vllm_flags:  # before the engines, which start minutes later
        engine_arguments(settings.target, settings.vllm_flags, CheckSettings, SESSION_SETTINGS)
    baseline = None
    if settings.baseline is not None:
        baseline = read_baseline(settings.baseline)
        require_same_pair(baseline, settings.target, settings.drafter)
    tuned = None
    if settings.tuned is not None:
        tuned = read_costs(settings.tuned, settings.target, settings.drafter)
    began, started = time.monotonic(), RunStart.now()
    result = assess(settings, progress or Progress.silent())
    findings = result.findings
    if baseline is not None:
        findings = [*findings, *baseline_findings(result, baseline)]
    pays = None
    if tuned is not None and result.offline is not None:
        pays = payoff(result.offline, tuned)
    result = result.judged(findings).model_copy(
        update={
            "pays": pays,
            "seconds": time.monotonic() - began,
            "provenance": Provenance.of_this_run(_fingerprints(settings), started),
        }
    )
    if settings.save is not None:
        write_text(settings.save, result.model_dump_json(indent=2) + "\n")
    if settings.report is not None:
        write_text(settings.report, page(result))
    return result


def _require_outputs(settings: CheckSettings) -> None:
    """Find outputs that cannot be written before the check runs for minutes."""
    for flag, path in (("--report", settings.report), ("--save", settings.save)):
        if path is None:
            continue
        if path.is_dir():
            raise FileError(f"{flag} {path} is a folder, expected the name of a file.")
        require_writable(flag, path)
        path.parent.mkdir(parents=True, exist_ok=True)
    if settings.fix is not None:
        refuse_existing(settings.fix)
        require_writable("--fix", settings.fix)


def _fingerprints(settings: CheckSettings) -> dict[str, str]:
    """Of target and drafter; a folder without a config, which is a finding, has none."""
    folders = {
        "target": local_folder(settings.target),
        "drafter": local_folder(settings.drafter),
    }
    with_config = {role: each for role, each in folders.items() if (each / "config.json").is_file()}
    return {role: fingerprint(folder) for role, folder in with_config.items()}


def assess(settings: CheckSettings, progress: Progress) -> CheckResult:
    """The findings of files and, unless they rule the pair out, of measurements."""
    target, drafter = local_folder(settings.target), local_folder(settings.drafter)
    findings = static_findings(
        target,
        drafter,
        target_name=settings.target,
        draft_tokens=settings.draft_tokens,
        dtype=settings.dtype,
        thinking=settings.thinking,
    )
    result = CheckResult(
        target=settings.target,
        drafter=settings.drafter,
        static_only=settings.static,
        verdict=verdict_of(findings),
        findings=findings,
        versions=installed_versions(),
        date=datetime.now(UTC).date().isoformat(),
    )
    # With an error in the files the engine would not start.
    if settings.static or any(each.severity is Severity.ERROR for each in findings):
        return result
    return _measured(result, target, drafter, settings, progress)


def _measured(
    result: CheckResult, target: Path, drafter: Path, settings: CheckSettings, progress: Progress
) -> CheckResult:
    checkpoint = read_checkpoint(drafter)
    facts = read_target(target, settings.target)
    draft_tokens = settings.draft_tokens or checkpoint.config.max_draft_tokens
    max_positions = min(facts.max_positions or MAX_PROMPT, checkpoint.config.max_positions)
    max_prompt = min(max_positions - MAX_TOKENS - draft_tokens, MAX_PROMPT)
    chat = Chat(target, settings.thinking)
    prompts = check_prompts(settings.prompts, chat, max_prompt, settings.texts)
    if not any(prompts.values()):
        raise CheckError(
            f"--prompts: every prompt is longer than {max_prompt} tokens, the most that this check "
            "can use. Give shorter prompts."
        )
    prompts, seen = without_seen(prompts, drafter)
    modes = other_modes(settings.prompts, target, chat, max_prompt)
    limit = long_context.context_limit(
        settings.long_context, checkpoint.config, facts.max_positions
    )
    lengths = long_context.context_lengths(limit, MAX_TOKENS + draft_tokens) if limit else []
    contexts = {
        long_context.set_name(length): tasks_in_context(chat, length, long_context.TASKS)
        for length in lengths
    }
    asked = [*prompts.values(), *contexts.values()]
    longest_prompt = max(len(prompt) for part in asked for prompt in part)
    longest_text = longest_prompt + MAX_TOKENS + draft_tokens
    precision: torch.dtype = getattr(torch, served_dtype(target, settings.dtype))
    rounding = rounding_of(target, precision, settings.vllm_flags)
    reports = 3 + 5 * len(prompts) + len(contexts) + len(modes)
    advance = progress.stage("vLLM with and without the drafter", reports)
    runs = run_engines(
        target,
        drafter,
        prompts,
        max_tokens=MAX_TOKENS,
        draft_tokens=draft_tokens,
        max_length=longest_text,
        dtype=precision,
        control=rounding != torch.float32,  # in which rounding does not change texts
        bare_only=modes,
        contexts=contexts,
        vllm_flags=settings.vllm_flags,
        report=lambda _: advance(),
    )
    # The engines have ended and freed it.
    device = reference_device(target, precision, settings.vllm_flags)
    with reference_target(
        target,
        {*layers_needed(checkpoint.config, facts.num_layers), *checkpoint.config.target_layer_ids},
        precision,
        longest=longest_text,
        device=device,
        urls=settings.states_from,
        vllm_flags=settings.vllm_flags,
        exact=True,
    ) as model:
        advance = progress.stage("engine against reference", 2)
        same_drafts = None
        if runs.recorded is not None:
            same_drafts = parity.compare(target, drafter, model, runs.recorded, precision, rounding)
        advance()
        same_texts = lossless.compare_answers(
            model, prompts, runs.bare, runs.speculative, rounding, draft_tokens + 1
        )
        if runs.control is not None:
            batches = SESSION_CONCURRENCY, CONTROL_BATCH
            same_texts = lossless.with_control(
                same_texts, model, prompts, runs.bare, runs.control, batches
            )
        advance()
        answered = _texts(prompts, runs.bare)
        texts = [t for part in answered.values() for t in part if len(t.answer) > draft_tokens]
        probe = Probe(
            target,
            model,
            texts,
            layers_needed(checkpoint.config, facts.num_layers),
            precision,
            progress.stage("hidden states of the target", len(texts)),
            device,
        )
        masks = mask_candidates(target, facts.vocab_size)
        diagnosis = diagnose(probe, facts, checkpoint, draft_tokens, masks, precision, progress)
        offline, in_modes = diagnosis.offline, _texts(modes, runs.bare)
        in_contexts = None
        if contexts:
            in_contexts = long_context.compare(
                runs.in_contexts, contexts, checkpoint.config, facts.max_positions, limit
            )
        proofs = (
            lossless.finding_of(same_texts),
            NO_PARITY if same_drafts is None else parity.finding_of(same_drafts),
            prefix_cache.finding_of(runs.cached),
            None if in_contexts is None else long_context.finding_of(in_contexts),
        )
        findings = [
            *result.findings,
            *seen,
            *(each for each in proofs if each is not None),
            *diagnosis.findings,
            *mode_findings(
                target, model, checkpoint, draft_tokens, in_modes, offline, precision, device
            ),
            *served_findings(offline, runs.served[0]),
            *precision_findings(offline.overall, len(offline.by_set), settings.texts),
        ]
    if settings.fix is not None and diagnosis.repair is None:
        message = f"no edit raises acceptance, so nothing was written to {settings.fix}"
        findings.append(note("nothing-to-fix", message, "None needed."))
    elif settings.fix is not None and diagnosis.repair is not None:
        write_repaired(drafter, diagnosis.repair, settings.fix, facts.num_layers)
        message = f"wrote {settings.fix} with the edit: {diagnosis.repair.edit}"
        remedy = f"Check it again: leadout check {settings.target} {settings.fix}"
        findings.append(note("fixed", message, remedy))
    return result.model_copy(
        update={
            "findings": findings,
            "draft_tokens": draft_tokens,
            "offline": offline,
            "served": runs.served,
            "parity": same_drafts,
            "lossless": same_texts,
            "prefix_cache": runs.cached,
            "long_context": in_contexts,
            "tried": diagnosis.tried,
        }
    )


def _texts(prompts: TokensBySet, answers: TokensBySet) -> dict[str, list[Text]]:
    return {
        name: [Text(name, *pair) for pair in zip(part, answers[name], strict=True)]
        for name, part in prompts.items()
    }


def mask_candidates(target: Path, vocab_size: int) -> list[int]:
    """Tokens that may have been the mask in training: special ones and the first free row."""
    files = read_token_files(target, [])
    if files is None:
        return []
    special = sorted({*files.special, *files.roles})
    free = max(files.tokens, default=-1) + 1
    return [*([free] if free < vocab_size else []), *special][:MAX_MASK_CANDIDATES]


def served_findings(offline: OfflineAcceptance, served: ServedAcceptance) -> list[Finding]:
    """Offline and served acceptance length have one definition, so they must nearly agree.

    With too few texts the last steps of the answers, which the reference does not count, weigh so
    much that a difference proves nothing.
    """
    expected = offline.overall.length.value
    proven = half_width(offline.overall.length) <= MAX_HALF_WIDTH
    difference = served.length / expected - 1
    if abs(difference) <= MAX_SERVED_DIFFERENCE:
        return []
    return [
        finding(
            Severity.ERROR if difference < 0 and proven else Severity.WARNING,
            "served-differs",
            f"the acceptance length is {served.length:.3f} in vLLM but {expected:.3f} in the "
            f"reference on the same prompts ({difference:+.1%}), more than "
            f"{MAX_SERVED_DIFFERENCE:.0%} apart",
            "The engine computes other drafts than the reference; see the parity result.",
            served=served.length,
            offline=expected,
        )
    ]


@dataclass(frozen=True, slots=True)
class EngineRuns:
    bare: TokensBySet  # greedy, without the drafter
    control: TokensBySet | None  # the same at another batch size, if asked for
    speculative: TokensBySet  # greedy, with it
    served: list[ServedAcceptance]  # greedy, then sampled
    cached: PrefixCache
    in_contexts: list[SetRun]  # greedy, with the drafter
    recorded: list[RecordedText] | None  # None: the engine has several workers


def run_engines(
    target: Path,
    drafter: Path,
    prompts: TokensBySet,
    *,
    max_tokens: int,
    draft_tokens: int,
    max_length: int,
    dtype: torch.dtype,
    control: bool = False,
    bare_only: TokensBySet | None = None,
    contexts: TokensBySet | None = None,
    vllm_flags: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> EngineRuns:
    """Answer the prompts with and without the drafter; `report` is called after each part.

    With `control` they are answered once more without the drafter, at another batch size.

    The prompts in `bare_only` are answered without the drafter only, those in `contexts` with the
    drafter only.
    """

    records = can_record(str(target), vllm_flags)

    def of_prompts(one: Pass) -> Pass:
        return one.model_copy(update={"sets": list(prompts)})

    with TemporaryDirectory(prefix="leadout-check-") as folder:
        path = Path(folder) / "drafts.safetensors"
        alone = SessionRequest(
            target=str(target),
            prompts=prompts,
            max_tokens=max_tokens,
            max_length=max_length,
            dtype=str(dtype).removeprefix("torch."),
            vllm_flags=list(vllm_flags),
        )
        together = alone.model_copy(
            update={
                "drafter": str(drafter),
                "draft_tokens": draft_tokens,
                "prompts": prompts | (contexts or {}),
                "passes": [
                    *(of_prompts(each) for each in (GREEDY, WARM, SAMPLED)),
                    LONG.model_copy(update={"sets": list(contexts or {})}),
                ],
                "recording": Recording(
                    prompts=_some_of_each(prompts), blocks=RECORDED_BLOCKS, path=path
                )
                if records
                else None,
            }
        )
        speculative = run_session(together, lambda done: report(f"with drafter: {done}"))
        recorded = read_texts(path) if records else None
    passes = [GREEDY]
    if control:
        passes.append(of_prompts(CONTROL))
    alone = alone.model_copy(update={"prompts": prompts | (bare_only or {}), "passes": passes})
    bare = run_session(alone, lambda done: report(f"without drafter: {done}"))
    return EngineRuns(
        bare=_answers(bare.runs, GREEDY),
        control=_answers(bare.runs, CONTROL) or None,
        speculative=_answers(speculative.runs, GREEDY),
        served=served_acceptance(_of(speculative.runs, GREEDY) + _of(speculative.runs, SAMPLED)),
        cached=prefix_cache.compare(
            prompts, _of(speculative.runs, GREEDY), _of(speculative.runs, WARM)
        ),
        in_contexts=_of(speculative.runs, LONG),
        recorded=recorded,
    )


def _some_of_each(prompts: TokensBySet) -> list[list[int]]:
    """The first prompt of every set, then the second, up to `RECORDED_PROMPTS`."""
    by_turns = chain.from_iterable(zip_longest(*prompts.values()))
    return list(islice((prompt for prompt in by_turns if prompt is not None), RECORDED_PROMPTS))


def _answers(runs: Sequence[SetRun], of: Pass) -> TokensBySet:
    return {run.prompt_set: run.answers for run in _of(runs, of)}


def _of(runs: Sequence[SetRun], one: Pass) -> list[SetRun]:
    return [run for run in runs if run.pass_name == one.name]


def served_acceptance(runs: Sequence[SetRun]) -> list[ServedAcceptance]:
    """Acceptance by the engine's counters, one entry per temperature in the order of the runs."""
    found = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        own = [run for run in runs if run.temperature == temperature]
        steps = sum(run.steps for run in own)
        by_position = zip(*(run.accepted_by_position for run in own), strict=True)
        accepted = [sum(counts) for counts in by_position]
        found.append(
            ServedAcceptance(
                temperature=temperature,
                steps=steps,
                length=1 + sum(accepted) / max(steps, 1),
                by_position=[count / max(steps, 1) for count in accepted],
                by_set={run.prompt_set: run.acceptance_length for run in own},
            )
        )
    return found

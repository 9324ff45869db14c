"""What files, versions and settings show about a pair, in seconds and without an engine."""

from __future__ import annotations

from pathlib import Path

from leadout.check.tokenizer import (
    TokenFiles,
    mask_findings,
    read_token_files,
    vocabulary_findings,
)
from leadout.check.training_record import record_findings
from leadout.check.weights import drafter_weight_findings, target_weight_findings
from leadout.checkpoints import (
    Checkpoint,
    CheckpointError,
    UnsupportedCheckpointError,
    read_checkpoint,
)
from leadout.engine.vllm_adapter import SUPPORTED, installed_distribution, is_supported
from leadout.environment import known_problems
from leadout.findings import Finding, Severity
from leadout.pairing import EngineSettings, Pair, TargetFacts, examine, read_target
from leadout.pairing.target import read_any_config
from leadout.version import installed_version

# Warnings that working pairs cause: quantised copies of a named target, rows of padding, and
# scalings that do not change greedy drafts.
HARMLESS_RULES = frozenset({"verifier", "vocabulary-padding", "logit-scaling"})


def static_findings(
    target: Path,
    drafter: Path,
    *,
    target_name: str | None = None,
    draft_tokens: int | None = None,
    dtype: str = "auto",
    thinking: bool | None = None,
) -> list[Finding]:
    """Everything that can be found before an engine is started.

    `target` is a folder with tokenizer and chat template; if it has no weights, the checks of
    weights are skipped. `target_name` is the user's name for it, by default the folder.
    """
    findings = version_findings()
    facts, checkpoint = _target_facts(target, target_name, findings), _drafter(drafter, findings)
    tokens = read_token_files(target, findings)
    if facts is not None:
        findings += target_weight_findings(target, facts)
    if facts is not None and checkpoint is not None:
        settings = _settings(checkpoint, facts, draft_tokens, served_dtype(target, dtype))
        findings += pairing_findings(Pair(facts, checkpoint, settings))
        findings += _position_findings(checkpoint, facts)
        findings += _token_findings(tokens, checkpoint, facts)
    if checkpoint is not None:
        findings += drafter_weight_findings(checkpoint)
        findings += record_findings(checkpoint, target, tokens, thinking)
        findings += [_note(note) for note in checkpoint.notes]
    return findings


def pairing_findings(pair: Pair) -> list[Finding]:
    """Broken pairing rules; a warning that working pairs cause becomes a note."""
    return [
        broken.model_copy(update={"severity": Severity.NOTE})
        if broken.severity is Severity.WARNING and broken.name in HARMLESS_RULES
        else broken
        for broken in examine(pair)
    ]


def version_findings() -> list[Finding]:
    """Installed versions that decide whether a pair runs."""
    findings = []
    distribution = installed_distribution()
    version = None if distribution is None else installed_version(distribution)
    if version is None:
        findings.append(
            Finding(
                name="engine-missing",
                severity=Severity.NOTE,
                message=f"vLLM is not installed; running the pair needs {SUPPORTED}",
                remedy="pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator).",
            )
        )
    elif not is_supported(version):
        findings.append(
            Finding(
                name="engine-version",
                severity=Severity.WARNING,
                message=(
                    f"{distribution} {version} is installed, expected {SUPPORTED}: Leadout does "
                    "not extend other versions, and this check may not apply to them"
                ),
                evidence={"version": version},
                remedy=f"Install vLLM {SUPPORTED}.",
            )
        )
    for problem in known_problems():
        message, _, remedy = problem.partition("; ")
        findings.append(
            Finding(
                name="torch-companion", severity=Severity.WARNING, message=message, remedy=remedy
            )
        )
    return findings


def _target_facts(folder: Path, name: str | None, findings: list[Finding]) -> TargetFacts | None:
    try:
        return read_target(folder, name)
    except CheckpointError as problem:
        findings.append(_unreadable("target-unreadable", problem))
        return None


def _drafter(folder: Path, findings: list[Finding]) -> Checkpoint | None:
    try:
        return read_checkpoint(folder)
    except UnsupportedCheckpointError as problem:
        findings.append(_unreadable("drafter-unsupported", problem))
    except CheckpointError as problem:
        findings.append(_unreadable("drafter-unreadable", problem))
    return None


def _unreadable(name: str, problem: CheckpointError) -> Finding:
    return Finding(
        name=name,
        severity=Severity.ERROR,
        message=str(problem).removesuffix(f". {problem.remedy}"),
        evidence={"field": problem.field},
        remedy=problem.remedy,
    )


def _settings(
    checkpoint: Checkpoint, facts: TargetFacts, draft_tokens: int | None, dtype: str
) -> EngineSettings:
    """The requested K and precision; what only an engine knows is set so that no rule breaks."""
    config = checkpoint.config
    drafted = config.max_draft_tokens if draft_tokens is None else draft_tokens
    length = min(config.max_positions, facts.max_positions or config.max_positions)
    return EngineSettings(
        draft_tokens=drafted,
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=max(length, 1 + 2 * drafted),
        dtype=dtype,
        model_runner="V2",
        backend_name=None,
        backend_takes_non_causal=None,
        served_causal=None,
    )


def served_dtype(target: Path, dtype: str) -> str:
    """The precision that is served: with `auto`, that of the target's config."""
    if dtype != "auto":
        return dtype
    config = read_any_config(target)
    nested = config.get("text_config")
    sections = (config, nested if isinstance(nested, dict) else {})
    stated = [section.get(name) for section in sections for name in ("dtype", "torch_dtype")]
    return next((value for value in stated if isinstance(value, str)), "bfloat16")


def _position_findings(checkpoint: Checkpoint, facts: TargetFacts) -> list[Finding]:
    of_drafter, of_target = checkpoint.config.max_positions, facts.max_positions
    if of_target is None or of_drafter >= of_target:
        return []
    return [
        Finding(
            name="positions",
            severity=Severity.NOTE,
            message=(
                f"max_position_embeddings is {of_drafter} in the drafter and {of_target} in the "
                "target: nothing can be drafted for longer requests"
            ),
            evidence={"drafter": of_drafter, "target": of_target},
            remedy=f"Serve with --max-model-len {of_drafter}.",
        )
    ]


def _token_findings(
    tokens: TokenFiles | None, checkpoint: Checkpoint, facts: TargetFacts
) -> list[Finding]:
    if tokens is None:
        return []
    config = checkpoint.config
    return [
        *vocabulary_findings(tokens, facts.vocab_size, config.vocab_size),
        *mask_findings(tokens, config.mask_token_id),
    ]


def _note(text: str) -> Finding:
    return Finding(
        name="drafter-file",
        severity=Severity.NOTE,
        message=text,
        remedy="Nothing to do if you serve with Leadout; `leadout inspect` shows the file.",
    )

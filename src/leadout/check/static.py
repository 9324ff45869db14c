"""What files, versions and settings alone tell about a pair, in seconds and without an engine."""

from __future__ import annotations

from pathlib import Path

from leadout.check.record import record_findings
from leadout.check.result import Finding, Gravity
from leadout.check.target_files import (
    TokenFiles,
    mask_findings,
    read_token_files,
    vocabulary_findings,
    weight_file_findings,
)
from leadout.check.weights import weight_findings
from leadout.checkpoints import (
    Checkpoint,
    CheckpointError,
    UnsupportedCheckpointError,
    read_checkpoint,
)
from leadout.engine.vllm_adapter import SUPPORTED, installed_distribution, is_supported
from leadout.environment import known_problems
from leadout.findings import Severity
from leadout.pairing import EngineSettings, Pair, TargetFacts, examine, read_target
from leadout.pairing.target import read_any_config
from leadout.version import installed_version

# Warnings that working pairs cause: quantised copies of a named target, rows of padding, and
# scalings that leave greedy drafts what they are.
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
    """Everything that can be said before anything is run.

    `target` is a folder with tokenizer and chat template; without weights in it, what needs them
    is passed over. `target_name` is what the user calls the target, the folder unless given.
    """
    findings = version_findings()
    facts, checkpoint = _target_facts(target, target_name, findings), _drafter(drafter, findings)
    tokens = read_token_files(target, findings)
    if facts is not None:
        findings += weight_file_findings(target, facts)
    if facts is not None and checkpoint is not None:
        settings = _settings(checkpoint, facts, draft_tokens, served_dtype(target, dtype))
        findings += pairing_findings(Pair(facts, checkpoint, settings))
        findings += _position_findings(checkpoint, facts)
        findings += _token_findings(tokens, checkpoint, facts)
    if checkpoint is not None:
        findings += weight_findings(checkpoint)
        findings += record_findings(checkpoint, target, tokens, thinking)
        findings += [_note(note) for note in checkpoint.notes]
    return findings


def pairing_findings(pair: Pair) -> list[Finding]:
    """Broken rules of pairing, in the gravity that they have for a deployment."""
    return [
        Finding(
            name=broken.name,
            gravity=_gravity(broken.name, broken.severity),
            message=broken.message,
            remedy=broken.remedy,
        )
        for broken in examine(pair)
    ]


def version_findings() -> list[Finding]:
    """What is installed here, as far as it decides whether a pair runs."""
    findings = []
    distribution = installed_distribution()
    version = None if distribution is None else installed_version(distribution)
    if version is None:
        findings.append(
            Finding(
                name="engine-missing",
                gravity=Gravity.NOTE,
                message=f"found no vLLM here, wanted {SUPPORTED} to run the pair",
                remedy="pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator).",
            )
        )
    elif not is_supported(version):
        findings.append(
            Finding(
                name="engine-version",
                gravity=Gravity.DOUBTFUL,
                message=(
                    f"found {distribution} {version}, wanted {SUPPORTED}: Leadout does not extend "
                    "other versions, and what this check knows of vLLM may not hold"
                ),
                evidence={"version": version},
                remedy=f"Install vLLM {SUPPORTED}.",
            )
        )
    for trouble in known_problems():
        message, _, remedy = trouble.partition("; ")
        findings.append(
            Finding(
                name="torch-companion", gravity=Gravity.DOUBTFUL, message=message, remedy=remedy
            )
        )
    return findings


def unreadable(name: str, problem: CheckpointError) -> Finding:
    """A file that cannot be used, as a finding."""
    return Finding(
        name=name,
        gravity=Gravity.UNFIT,
        message=str(problem).removesuffix(f". {problem.remedy}"),
        evidence={"field": problem.field},
        remedy=problem.remedy,
    )


def _target_facts(folder: Path, name: str | None, findings: list[Finding]) -> TargetFacts | None:
    try:
        return read_target(folder, name)
    except CheckpointError as problem:
        findings.append(unreadable("target-unreadable", problem))
        return None


def _drafter(folder: Path, findings: list[Finding]) -> Checkpoint | None:
    try:
        return read_checkpoint(folder)
    except UnsupportedCheckpointError as problem:
        findings.append(unreadable("drafter-unsupported", problem))
    except CheckpointError as problem:
        findings.append(unreadable("drafter-unreadable", problem))
    return None


def _gravity(rule: str, severity: Severity) -> Gravity:
    if severity is Severity.ERROR:
        return Gravity.UNFIT
    return Gravity.NOTE if rule in HARMLESS_RULES else Gravity.DOUBTFUL


def _settings(
    checkpoint: Checkpoint, facts: TargetFacts, draft_tokens: int | None, dtype: str
) -> EngineSettings:
    """The asked K and precision; all that only an engine knows is set so that no rule breaks."""
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
    """`auto` is the precision that the target's config names."""
    if dtype != "auto":
        return dtype
    config = read_any_config(target)
    nested = config.get("text_config")
    sections = (config, nested if isinstance(nested, dict) else {})
    stated = [section.get(name) for section in sections for name in ("dtype", "torch_dtype")]
    return next((value for value in stated if isinstance(value, str)), "bfloat16")


def _position_findings(checkpoint: Checkpoint, facts: TargetFacts) -> list[Finding]:
    found, wanted = checkpoint.config.max_positions, facts.max_positions
    if wanted is None or found >= wanted:
        return []
    return [
        Finding(
            name="positions",
            gravity=Gravity.NOTE,
            message=(
                f"found max_position_embeddings {found} in the drafter, {wanted} in the target: "
                "longer requests cannot be drafted for"
            ),
            evidence={"drafter": found, "target": wanted},
            remedy=f"Serve with --max-model-len {found}.",
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
        gravity=Gravity.NOTE,
        message=text,
        remedy="Nothing to do where you serve with Leadout; `leadout inspect` shows the file.",
    )

"""What files, versions and settings show about a pair, in seconds and without an engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel

from leadout.check.tokenizer import (
    TokenFiles,
    mask_findings,
    read_token_files,
    vocabulary_findings,
)
from leadout.check.weights import drafter_weight_findings, has_weights, target_weight_findings
from leadout.checkpoints import (
    Checkpoint,
    CheckpointError,
    UnsupportedCheckpointError,
    read_checkpoint,
)
from leadout.engine.installation import installed_distribution
from leadout.engine.vllm_internals import SUPPORTED, is_supported
from leadout.environment import known_problems
from leadout.files import FileError, read_model
from leadout.findings import Finding, Severity, error, finding, note, warning
from leadout.models import fingerprint
from leadout.pairing import EngineSettings, Pair, TargetFacts, examine, read_target
from leadout.pairing.target import read_any_config
from leadout.pairing.trainable import refusal
from leadout.version import installed_version

# Warnings that working pairs cause: quantised copies of a named target, rows of padding, and
# scalings that do not change greedy drafts.
HARMLESS_RULES = frozenset({"verifier", "vocabulary-padding", "logit-scaling"})
RECORD = "training.json"
THINKING_SWITCH = "enable_thinking"  # the variable in templates with two modes


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
    facts = checkpoint = None
    try:
        facts = read_target(target, target_name)
    except CheckpointError as problem:
        findings.append(_unreadable("target-unreadable", problem))
    try:
        checkpoint = read_checkpoint(drafter)
    except UnsupportedCheckpointError as problem:
        findings.append(_unreadable("drafter-unsupported", problem))
    except CheckpointError as problem:
        findings.append(_unreadable("drafter-unreadable", problem))
    tokens = read_token_files(target, findings)
    if facts is not None:
        refused = refusal(read_any_config(target), new=False)
        if refused is not None:
            message = f"the target cannot have a drafter: {refused.reason}"
            findings.append(error("target-unsupported", message, refused.remedy))
        findings += target_weight_findings(target, facts)
    if facts is not None and checkpoint is not None:
        config = checkpoint.config
        settings = _settings(checkpoint, facts, draft_tokens, served_dtype(target, dtype))
        findings += pairing_findings(Pair(facts, checkpoint, settings))
        findings += _position_findings(config.max_positions, facts.max_positions)
        if tokens is not None:
            findings += vocabulary_findings(tokens, facts.vocab_size, config.vocab_size)
            findings += mask_findings(tokens, config.mask_token_id)
    if checkpoint is not None:
        findings += drafter_weight_findings(checkpoint)
        findings += record_findings(checkpoint, target, tokens, thinking)
        remedy = "Nothing to do if you serve with Leadout; `leadout inspect` shows the file."
        findings += [note("drafter-file", text, remedy) for text in checkpoint.notes]
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
        message = f"vLLM is not installed; running the pair needs {SUPPORTED}"
        remedy = "pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator)."
        findings.append(note("engine-missing", message, remedy))
    elif not is_supported(version):
        message = (
            f"{distribution} {version} is installed, expected {SUPPORTED}: Leadout does not extend "
            "other versions, and this check may not apply to them"
        )
        remedy = f"Install vLLM {SUPPORTED}."
        findings.append(warning("engine-version", message, remedy, version=version))
    for problem in known_problems():
        message, _, remedy = problem.partition("; ")
        findings.append(warning("torch-companion", message, remedy))
    return findings


def _unreadable(name: str, problem: CheckpointError) -> Finding:
    message = str(problem).removesuffix(f". {problem.remedy}")
    return error(name, message, problem.remedy, field=problem.field)


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


def _position_findings(of_drafter: int, of_target: int | None) -> list[Finding]:
    if of_target is None or of_drafter >= of_target:
        return []
    message = (
        f"max_position_embeddings is {of_drafter} in the drafter and {of_target} in the target: "
        "nothing can be drafted for longer requests"
    )
    remedy = f"Serve with --max-model-len {of_drafter}."
    return [note("positions", message, remedy, drafter=of_drafter, target=of_target)]


class TrainedConfig(BaseModel, extra="ignore", frozen=True):
    """The training settings that the drafter's config.json repeats."""

    layers: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None


class TrainingRecord(BaseModel, extra="ignore", frozen=True):
    """The fields of training.json that a check needs; other versions may write more."""

    target: str
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None
    config: TrainedConfig = TrainedConfig()


def record_findings(
    checkpoint: Checkpoint, target: Path, tokens: TokenFiles | None, thinking: bool | None
) -> list[Finding]:
    """Compare the record beside the drafter, if there is one, with the pair as it is now."""
    path = checkpoint.path / RECORD
    if not path.is_file():
        return []
    try:
        record = read_model(path, TrainingRecord)
    except FileError:
        message = f"{path} is not a record that `leadout train` wrote, so it was ignored"
        remedy = "Remove the file if it belongs to something else."
        return [note("record-unreadable", message, remedy)]
    template = None if tokens is None else tokens.template
    findings = _changed_drafter(record, checkpoint)
    then = record.target_fingerprint
    if then is not None and has_weights(target) and (now := fingerprint(target)) != then:
        message = (
            f"the target's fingerprint is {now[:12]}, but the drafter was trained for "
            f"{record.target} with {then[:12]}: this is another model, or it was fine-tuned, "
            "merged or quantised since"
        )
        remedy = "Serve the target of the training, or continue training for this one."
        findings.append(warning("other-target", message, remedy, found=now, wanted=then))
    then, now = record.template_hash, hashlib.sha256((template or "").encode()).hexdigest()
    if then is not None and template is not None and now != then:
        message = (
            f"the chat template's hash is {now[:12]}, but the drafter's training text was made "
            f"with a template of hash {then[:12]}"
        )
        remedy = "Serve with the template of the training, or train the drafter with this one."
        findings.append(warning("other-template", message, remedy, found=now, wanted=then))
    return findings + _other_thinking(record, template, thinking)


def _changed_drafter(record: TrainingRecord, checkpoint: Checkpoint) -> list[Finding]:
    config, trained = checkpoint.config, record.config
    pairs = {
        "num_hidden_layers": (config.num_layers, trained.layers),
        "block_size": (config.block_size, trained.block_size),
        "target_layer_ids": (config.target_layer_ids, trained.target_layer_ids),
        "mask_token_id": (config.mask_token_id, trained.mask_token_id),
    }
    changed = {
        name: f"{name} is {_shown(now)} but was {_shown(then)}"
        for name, (now, then) in pairs.items()
        if then is not None and now != then
    }
    if not changed:
        return []
    message = f"{', '.join(changed.values())} in training, according to {RECORD}"
    remedy = "Restore the values of the training in the drafter's config.json."
    return [warning("not-as-trained", message, remedy, fields=", ".join(changed))]


def _other_thinking(
    record: TrainingRecord, template: str | None, thinking: bool | None
) -> list[Finding]:
    """The thinking modes of one target produce different kinds of text."""
    recorded = "thinking" in record.model_fields_set
    has_modes = template is not None and THINKING_SWITCH in template
    if not recorded or not has_modes or record.thinking == thinking:
        return []
    certain = None not in (record.thinking, thinking)
    modes = {
        None: "in the template's default mode",
        True: "with thinking",
        False: "without thinking",
    }
    return [
        finding(
            Severity.WARNING if certain else Severity.NOTE,
            "other-thinking",
            f"the drafter was trained {modes[record.thinking]} and is checked {modes[thinking]}",
            "Check and serve it in the mode it was trained in.",
        )
    ]


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)

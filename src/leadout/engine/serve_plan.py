"""What a server that captures or follows a registry must have before it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from leadout.checkpoints import Checkpoint, CheckpointError, load_weights, read_checkpoint
from leadout.control.tuned_file import Tuned, read_tuned
from leadout.engine.capture_store import INFO, info_of_target, require_same_target
from leadout.engine.pair import UnfitPairError, pair_of, pair_to_be, require_no_refusal
from leadout.engine.server import server_command
from leadout.engine.settings import SCHEDULER, CaptureSettings, LiveSettings, RegistrySettings
from leadout.engine.vllm_flags import (
    DRAFT_LENGTH,
    PLUGINS,
    Parts,
    endpoints_let_in,
    environment_for,
    flags_for,
    notes_on_circumstances,
    require_measured_pair,
    require_no_other_draft_length,
    speculation_by,
)
from leadout.findings import Severity
from leadout.models import ModelNotFoundError, fingerprint, local_folder
from leadout.pairing import examine
from leadout.pairing.published import AS_OF, find_published
from leadout.pairing.rules import batched_tokens_for
from leadout.pairing.target import read_any_config
from leadout.registry import Registry, RegistryError
from leadout.shards import ShardError


def version_to_serve(folder: Path, target: str, other: str | None, notes: list[str]) -> str:
    """The folder of the version that the registry points to."""
    if other is not None:
        raise UnfitPairError(
            f"--registry: found the drafter {other} as well, wanted one of the two; leave out "
            "--draft, or publish it with `leadout learn --start`"
        )
    registry = Registry(folder.resolve())
    pointer = registry.require_pointer()
    manifest = registry.verify(pointer.version)
    found = fingerprint(local_folder(target))
    if manifest.target_fingerprint != found:
        raise RegistryError(
            f"--registry {folder} holds drafters for the target with fingerprint "
            f"{manifest.target_fingerprint[:12]}; {target} has {found[:12]}. Serve the registry's "
            "target, or start a new registry."
        )
    notes.append(f"--registry: version {pointer.version}, and others as the pointer names them")
    return str(registry.path(pointer.version))


def require_own_folder(capture: CaptureSettings, target: str) -> None:
    """Not one with the traffic of another target."""
    if capture.folder is not None and (capture.folder / INFO).exists():
        try:
            require_same_target(capture.folder, info_of_target(target))
        except ShardError as problem:
            raise UnfitPairError(str(problem)) from None


# From a target and a drafter to the exact command of a vLLM server, or the reason why not.
#
# The settings that the rules look at are vLLM's own: its parser reads the flags and its config
# fills
# in the defaults of this machine, exactly as the server will do.

AUTO = "auto"
NOTHING_TO_DRAFT = (
    "serving WITHOUT speculation: by --tuned this drafter gains nothing here at any load"
)


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    target: str
    draft: str | None
    if_unfit: Literal["refuse", "bare"]
    flags: tuple[str, ...]  # any flag of vLLM's server
    tuned: Path | None = None  # what `leadout tune` wrote
    live: bool = False  # decide how much to draft at every step
    registry: Path | None = None  # serve the version it points to, and follow it
    capture: CaptureSettings | None = None


@dataclass(frozen=True)
class Plan:
    """The command that will run, and what was chosen on the way, in plain words."""

    command: list[str]
    notes: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # beside that of the caller


def make_plan(request: Request) -> Plan:
    """The server for this request; raises UnfitPairError, CheckpointError or RegistryError."""
    notes: list[str] = []
    named = _target_named_by(request.target)
    target = request.target if named is None or request.draft is not None else named
    asked = _asked_speculation(target, request.flags)
    bare = _without_speculation(request.flags)
    method = asked.get("method", "dflash")
    if method != "dflash":
        _require_dflash(method, request)
    if method != "dflash" and request.draft is None:
        passed_on = f"speculation by {method}: passed on to vLLM, not examined"
        return _without_drafter(target, list(request.flags), request, [passed_on])
    tuned = None if request.tuned is None else read_tuned(request.tuned)
    draft = request.draft or asked.get("model") or (request.target if named else None)
    if draft is None and tuned is not None and request.registry is None:
        draft = _drafter_of(tuned, notes)
    if draft is None and request.registry is None:
        notes.append("no drafter: plain vLLM")
        return _without_drafter(target, list(request.flags), request, notes)
    if target != request.target:
        notes.append(f"target {target}: named by the speculators checkpoint {request.target}")
    try:
        if request.registry is not None:
            draft = version_to_serve(request.registry, target, draft, notes)
        elif draft == AUTO:
            draft = _published_for(target, notes)
        assert draft is not None
        checkpoint = read_checkpoint(local_folder(draft, asked.get("revision")))
        load_weights(checkpoint)  # a value that is not finite is found now, not by the server
        notes += [f"drafter: {note}" for note in checkpoint.notes]
        if tuned is not None:
            require_no_other_draft_length(asked)
            require_measured_pair(tuned, local_folder(target), checkpoint.path)
        flags = _fitting_flags(
            target, draft, checkpoint, asked, bare, notes, tuned, is_live=request.live
        )
        if not any(_is_speculation(flag) for flag in flags):
            return _without_drafter(target, flags, request, notes)
        flags += _sound_scheduler(target, flags, request, notes)
        return _with_parts(target, flags, _parts_of(request), notes)
    except (UnfitPairError, CheckpointError, RegistryError, ModelNotFoundError) as problem:
        if request.if_unfit == "refuse":
            raise
        notes.append(f"serving WITHOUT speculation, as --if-unfit bare asks: {problem}")
        return _without_drafter(target, bare, request, notes)


def _require_dflash(method: str, request: Request) -> None:
    for flag, is_given in {
        "--tuned": request.tuned is not None,
        "--live": request.live,
        "--registry": request.registry is not None,
    }.items():
        if is_given:
            raise UnfitPairError(
                f"{flag}: found speculation by {method} in --speculative-config, wanted dflash"
                f"{', which was measured' if flag == '--tuned' else ''}; leave out one of the two"
            )


def _parts_of(request: Request) -> Parts:
    tuned = None if request.tuned is None else request.tuned.resolve()
    registry = request.registry
    return Parts(
        live=LiveSettings(tuned=tuned) if request.live else None,
        capture=request.capture,
        registry=None if registry is None else RegistrySettings(folder=registry.resolve()),
    )


def _sound_scheduler(
    target: str, flags: list[str], request: Request, notes: list[str]
) -> list[str]:
    """The scheduler that keeps sampled text right on CPUs, where no other part brings it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or _parts_of(request) != Parts():
        return []
    found = parse(target, flags).scheduler_cls
    if found is None:
        notes.append(
            "on CPUs no drafts are verified while a sampled request runs: see docs/limits.md"
        )
        return ["--scheduler-cls", SCHEDULER]
    notes.append(
        f"--scheduler-cls {found}: on CPUs vLLM 0.32 samples wrongly where it verifies drafts; "
        f"with {SCHEDULER} it does not"
    )
    return []


def _without_drafter(target: str, flags: list[str], request: Request, notes: list[str]) -> Plan:
    """Capture needs no drafter; the other parts do."""
    return _with_parts(target, flags, Parts(capture=request.capture), notes)


def _with_parts(target: str, flags: list[str], parts: Parts, notes: list[str]) -> Plan:
    if parts.capture is not None:
        require_own_folder(parts.capture, target)
        notes.append(
            f"--capture: token ids of {parts.capture.rate:.0%} of the requests are kept in "
            f"{parts.capture.folder}"
        )
    if parts != Parts():  # spares importing the engine only to add nothing
        flags = [*flags, *flags_for(parts, parse(target, flags))]
    environment = environment_for(parts)
    notes += [
        f"{PLUGINS} has to name plugins now, which also loads the endpoints of {name}"
        for name in endpoints_let_in(environment)
    ]
    return Plan(server_command(target, flags), notes, environment)


def _fitting_flags(
    target: str,
    draft: str,
    checkpoint: Checkpoint,
    asked: dict[str, Any],
    bare: list[str],
    notes: list[str],
    tuned: Tuned | None,
    *,
    is_live: bool,
) -> list[str]:
    """The flags of a server for this pair, put right where that is possible, else an error."""
    config = vllm_config_of(target, bare)
    if tuned is not None:
        notes += notes_on_circumstances(tuned, config)
    if tuned is None or is_live:
        lengths = {DRAFT_LENGTH: _draft_tokens(asked.get(DRAFT_LENGTH), checkpoint, notes)}
        if is_live:
            start = "nothing, and measures" if tuned is None else "the costs in the tuned file"
            notes.append(f"--live: K is the most; chosen at every step, starting from {start}")
    else:
        lengths = speculation_by(tuned, config)
        if not lengths:
            notes.append(NOTHING_TO_DRAFT)
            return bare
        notes.append(f"--tuned: {json.dumps(lengths)}")
    draft_tokens = lengths[DRAFT_LENGTH]
    sequences = config.scheduler_config.max_num_seqs
    budget = config.scheduler_config.max_num_batched_tokens
    needed = batched_tokens_for(sequences, draft_tokens)
    if budget < needed and parse(target, bare).max_num_batched_tokens is None:
        bare = [*bare, "--max-num-batched-tokens", str(needed)]
        notes.append(
            f"--max-num-batched-tokens {needed} instead of {budget}: room for {sequences} "
            f"sequences, of which each takes 1 + 2K = {1 + 2 * draft_tokens} tokens of a step"
        )
        config = vllm_config_of(target, bare)
    # The rules speak first, as vLLM's own refusals name neither a rule nor a remedy.
    require_no_refusal(examine(pair_to_be(config, checkpoint, draft_tokens)))
    ours = {"method": "dflash", "model": draft, **lengths}
    flags = [*bare, "--speculative-config", json.dumps({**asked, **ours})]
    findings = examine(pair_of(vllm_config_of(target, flags)))
    notes += [str(finding) for finding in findings if finding.severity is Severity.WARNING]
    require_no_refusal(findings)
    return flags


def _draft_tokens(asked: int | None, checkpoint: Checkpoint, notes: list[str]) -> int:
    most = checkpoint.config.max_draft_tokens
    if asked is None:
        chosen = checkpoint.draft_tokens or most
        source = "the checkpoint asks for it" if checkpoint.draft_tokens else "the default"
        notes.append(f"K = {chosen}: {source}; a block of {most + 1} holds at most {most} drafts")
        return chosen
    if asked > most:
        notes.append(
            f"draft-tokens: found num_speculative_tokens {asked}, put right to {most}: the "
            f"drafter's block of {most + 1} slots was never trained for more"
        )
    return min(asked, most)


def _drafter_of(tuned: Tuned, notes: list[str]) -> str | None:
    """The drafter that was measured; none if the file says to serve without it."""
    if Path(tuned.drafter.name).is_dir():
        notes.append(f"drafter {tuned.drafter.name}: named by --tuned")
        return tuned.drafter.name
    if tuned.max_drafts == 0:
        notes.append(NOTHING_TO_DRAFT)
        return None
    raise ModelNotFoundError(
        f"--tuned: found the drafter {tuned.drafter.name} in the file, which is no folder here, "
        "wanted one; name it with --draft"
    )


def _target_named_by(name: str) -> str | None:
    """The target that a speculators-format drafter names; None for any other model."""
    config = read_any_config(local_folder(name, config_only=True))
    section = config.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return named if isinstance(named, str) else None


def _published_for(target: str, notes: list[str]) -> str:
    found = find_published(target)
    if found is None:
        raise ModelNotFoundError(
            f"--draft auto: found no published drafter for {target} in the table of {AS_OF}, "
            "wanted one; name a drafter with --draft."
        )
    notes.append(f"drafter {found.drafter}: published for {found.target}, table of {AS_OF}")
    return found.drafter


# What vLLM makes of flags.


def parse(target: str, flags: Sequence[str]) -> Any:
    """The flags as vLLM's server parses them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", target, *flags])


def vllm_config_of(target: str, flags: Sequence[str]) -> Any:
    """What vLLM makes of these flags on this machine, without loading a weight."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = AsyncEngineArgs.from_cli_args(parse(target, flags))
    try:
        return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, NotImplementedError, OSError) as problem:
        raise UnfitPairError(f"vLLM refuses these settings: {problem}") from problem


def _asked_speculation(target: str, flags: Sequence[str]) -> dict[str, Any]:
    """The user's own speculative settings, of which ours take the rest."""
    if not any(_is_speculation(flag) for flag in flags):
        return {}  # spares importing the engine only to find nothing
    return dict(parse(target, flags).speculative_config or {})


def _without_speculation(flags: Sequence[str]) -> list[str]:
    kept, skip_value = [], False
    for flag in flags:
        if skip_value:
            skip_value = False
        elif _is_speculation(flag):
            skip_value = "=" not in flag
        else:
            kept.append(flag)
    return kept


def _is_speculation(flag: str) -> bool:
    """`--speculative-config VALUE`, also with `=`, underscores, or a dotted field of it."""
    name = flag.partition("=")[0].replace("_", "-")
    return name in ("--speculative-config", "-sc") or name.startswith("--speculative-config.")

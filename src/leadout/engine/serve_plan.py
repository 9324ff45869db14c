"""From the settings of `leadout serve` to the exact command of a vLLM server, or why there is none.

The values that the pairing rules examine are vLLM's own: its parser reads the flags and its config
fills in the defaults of this machine, exactly as the server will do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from leadout.checkpoints import CheckpointError, load_weights, read_checkpoint
from leadout.control.tuned_file import Tuned, read_tuned
from leadout.engine.capture_store import INFO, info_of_target, require_same_target
from leadout.engine.draft_plan import plan_drafting
from leadout.engine.hot_swap import version_to_start_with
from leadout.engine.learn_plan import NEEDS_DRAFTER, learn_settings, refuse_without_ring
from leadout.engine.pair import UnfitPairError
from leadout.engine.server import server_command
from leadout.engine.settings import (
    SCHEDULER,
    CalibrationSettings,
    CaptureSettings,
    LiveSettings,
    RegistrySettings,
    ServeSettings,
    read_key,
)
from leadout.engine.states_plan import refuse_without_states, states_flags
from leadout.engine.tuned_plan import drafter_of, require_no_draft_length
from leadout.engine.vllm_flags import (
    PLUGINS,
    Features,
    feature_environment,
    feature_flags,
    newly_loaded_endpoints,
    parse,
    speculation_of,
    without_revision,
    without_speculation,
)
from leadout.errors import LeadoutError
from leadout.models import ModelNotFoundError, commit_of, is_left_to_vllm, local_folder
from leadout.pairing.target import AS_OF, find_published, read_any_config
from leadout.registry import Registry, RegistryError
from leadout.sealed import Keys
from leadout.settings import SettingsError
from leadout.shards import ShardError
from leadout.storage import StorageError, is_url, resolved

AUTO = "auto"
# What `--if-unfit bare` answers with a server without a drafter.
_UNFIT = (UnfitPairError, SettingsError, CheckpointError, RegistryError, ModelNotFoundError)


@dataclass(frozen=True)
class Plan:
    """The command to run, and notes on what was chosen automatically."""

    command: list[str]
    notes: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # in addition to the caller's


def make_plan(settings: ServeSettings, calibration: CalibrationSettings | None = None) -> Plan:
    """The server for these settings, or a `LeadoutError` that says why there is none.

    With `calibration` it is one for `leadout tune`: it drafts what its requests ask for.
    """
    if settings.target.startswith("-"):
        raise SettingsError(
            f"Expected the target before {settings.target}: `leadout serve TARGET [FLAGS]`."
        )
    return _Planner(settings, calibration).plan()


class _Planner:
    def __init__(self, settings: ServeSettings, calibration: CalibrationSettings | None) -> None:
        self._settings, self._calibration = settings, calibration
        self._notes: list[str] = []
        # Refuses unknown flags.
        parsed = parse(settings.target, settings.vllm_flags) if settings.vllm_flags else None
        self._revision = None if parsed is None else parsed.revision
        self._download_dir = None if parsed is None else parsed.download_dir
        # What the user set in --speculative-config; the planner sets the rest.
        self._speculation = {} if parsed is None else speculation_of(parsed)
        self._other_flags = without_speculation(settings.vllm_flags)
        named = self._target_named_by_drafter()
        self._is_drafter = named is not None
        self._target = settings.target
        if named is not None and settings.draft is None:
            # The revision is that of the checkpoint that was named, not of its target.
            if self._revision is not None:
                self._speculation.setdefault("revision", self._revision)
            self._target, self._revision = named, None
            self._other_flags = without_revision(self._other_flags)
        self._tuned: Tuned | None = None

    def _target_named_by_drafter(self) -> str | None:
        """The target that a speculators-format drafter names; None for any other model."""
        name = self._settings.target
        if is_left_to_vllm(name):
            return None
        folder = local_folder(name, self._revision, self._download_dir, config_only=True)
        section = read_any_config(folder).get("speculators_config")
        verifier = section.get("verifier") if isinstance(section, dict) else None
        named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        return named if isinstance(named, str) else None

    def _target_folder(self, flag: str) -> Path:
        """The target's files; `flag` needs them to tell targets apart."""
        if is_left_to_vllm(self._target):
            raise SettingsError(
                f"{flag} needs a target whose files are in a folder or on the Hugging Face hub, "
                f"got {self._target}, which only vLLM can fetch. Download it and serve the folder, "
                f"or remove {flag}."
            )
        return local_folder(self._target, self._revision, self._download_dir)

    def plan(self) -> Plan:
        settings, notes = self._settings, self._notes
        if settings.states:
            flags, states = states_flags(settings, self._target_folder("--states"), notes)
            return self._with_features(flags, Features(states=states))
        refuse_without_states(settings)
        refuse_without_ring(settings)
        if settings.capture_upload is not None and settings.capture is None:
            raise SettingsError(
                "--capture-upload requires --capture: requests are written to a folder of this "
                "machine first. Add it, or remove --capture-upload."
            )
        _require_object_store(settings.capture_upload)
        if settings.registry_key is not None and settings.registry is None:
            raise SettingsError("--registry-key requires --registry. Add it, or remove the key.")
        method = self._speculation.get("method", "dflash")
        if method != "dflash":
            for name in ("tuned", "live", "registry", "learn_states"):
                if getattr(settings, name):
                    flag = f"--{name.replace('_', '-')}"
                    raise SettingsError(
                        f"{flag} works with the method dflash only, but --speculative-config has "
                        f"{method}. Remove one of the two."
                    )
            if settings.draft is None:
                notes.append(f"speculation with {method}: passed on to vLLM, not examined")
                return self._without_drafter([*settings.vllm_flags])
        if settings.tuned is not None:
            self._tuned = read_tuned(settings.tuned)
        drafter = self._named_drafter()
        if drafter is None and settings.registry is None:
            if settings.learn_states is not None:
                raise SettingsError(NEEDS_DRAFTER)
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
            return drafter_of(self._tuned, self._notes)
        return named

    def _with_drafter(self, drafter: str | None) -> Plan:
        settings, notes = self._settings, self._notes
        if settings.registry is not None:
            if (revision := self._speculation.pop("revision", None)) is not None:
                notes.append(f"revision {revision}: not used, since it names no drafter of yours")
            folder = self._target_folder("--registry")
            drafter = _current_version(settings, settings.registry, folder, drafter, notes)
        elif drafter == AUTO:
            drafter = self._published()
        assert drafter is not None
        if is_left_to_vllm(drafter):
            return self._with_unexamined(drafter)
        folder = local_folder(drafter, self._speculation.get("revision"), self._download_dir)
        checkpoint = read_checkpoint(folder, as_served=True)
        load_weights(checkpoint)  # finds values that are not finite before the server does
        notes += [f"drafter: {note}" for note in checkpoint.notes]
        notes += [
            f"drafter: has {what}, which is left to vLLM and not examined"
            for what in checkpoint.left_to_vllm
        ]
        if self._tuned is not None:
            require_no_draft_length(self._speculation)
            pair = self._target_folder("--tuned"), checkpoint.path
            if settings.registry is None:
                self._tuned.require_pair(*pair)
            else:
                notes += self._tuned.notes_on_version(*pair, checkpoint.config.block_size)
        drafting = plan_drafting(
            settings,
            self._calibration,
            self._target,
            self._other_flags,
            {**self._speculation, "method": "dflash", "model": drafter},
            self._tuned,
            checkpoint,
            notes,
        )
        if drafting is None:
            return self._without_drafter(self._other_flags)
        learn = None
        if settings.learn_states is not None:
            learn = learn_settings(
                settings,
                settings.learn_states,
                self._target,
                self._target_folder("--learn-states"),
                checkpoint,
                drafting.config,
                notes,
            )
        features = Features(
            capture=settings.capture_settings,
            draft_table=drafting.draft_table,
            calibration=self._calibration,
            learn=learn,
        )
        if settings.live:
            tuned = None if settings.tuned is None else settings.tuned.resolve()
            features = replace(features, live=LiveSettings(tuned=tuned))
        if settings.registry is not None:
            key = None if settings.registry_key is None else settings.registry_key.resolve()
            registry = RegistrySettings(folder=resolved(settings.registry), key=key)
            features = replace(features, registry=registry)
        return self._with_features(self._drafting_flags(drafting.flags, features), features)

    def _published(self) -> str:
        """The drafter of `--draft auto`, in the revision that is examined here.

        vLLM is given the commit: what it loads cannot be a later one that nobody has looked at.
        """
        found, revision = find_published(self._target), self._speculation.get("revision")
        if found is None:
            raise ModelNotFoundError(
                f"--draft auto: no published drafter for {self._target} in the table of {AS_OF}. "
                "Name a drafter with --draft."
            )
        note = f"drafter {found.drafter}: published for {found.target}, table of {AS_OF}"
        commit = commit_of(local_folder(found.drafter, revision, self._download_dir))
        if commit is not None:
            self._speculation["revision"] = commit
            note += f"; add --speculative-config.revision {commit} to keep to this one"
        self._notes.append(note)
        return found.drafter

    def _with_unexamined(self, drafter: str) -> Plan:
        """For a drafter that only vLLM can fetch."""
        for name in ("tuned", "live", "learn_states"):
            if getattr(self._settings, name):
                flag = f"--{name.replace('_', '-')}"
                raise SettingsError(
                    f"{flag} needs a drafter whose files are in a folder or on the Hugging Face "
                    f"hub, got {drafter}, which only vLLM can fetch. Download it and name the "
                    f"folder, or remove {flag}."
                )
        self._notes.append(f"drafter {drafter}: only vLLM can fetch it; passed on, not examined")
        speculation = {**self._speculation, "method": "dflash", "model": drafter}
        flags = [*self._other_flags, "--speculative-config", json.dumps(speculation)]
        features = Features(capture=self._settings.capture_settings)
        return self._with_features(self._drafting_flags(flags, features), features)

    def _drafting_flags(self, flags: list[str], features: Features) -> list[str]:
        if features != Features():  # each feature comes with Leadout's scheduler
            return flags
        return [*flags, *_sampling_workaround(self._target, flags, self._notes)]

    def _without_drafter(self, flags: list[str]) -> Plan:
        """Capture and calibration are the features that need no drafter."""
        if self._settings.learn_states is not None:
            self._notes.append("--learn-states: off, because nothing is drafted")
        features = Features(capture=self._settings.capture_settings, calibration=self._calibration)
        if features == Features():
            flags = [*_seed_scheduler(self._target, flags, self._notes), *flags]
        return self._with_features(flags, features)

    def _with_features(self, flags: list[str], features: Features) -> Plan:
        notes, capture = self._notes, features.capture
        if capture is not None:
            self._require_own_folder(capture)
            how = ", encrypted" if Keys.read(capture.key).are_given else ""
            notes.append(
                f"--capture: token ids of {capture.rate:.0%} of the requests are kept in "
                f"{capture.folder}{how}"
            )
        if capture is not None and capture.upload is not None:
            notes.append(f"--capture-upload: finished files are moved to {capture.upload}")
        if features != Features():
            flags = [*flags, *feature_flags(features, parse(self._target, flags))]
        environment = feature_environment(features)
        notes += [
            f"{PLUGINS} must name plugins now, which also loads the endpoints of {name}"
            for name in newly_loaded_endpoints(environment)
        ]
        return Plan(server_command(self._target, flags), notes, environment)

    def _require_own_folder(self, capture: CaptureSettings) -> None:
        """Refuse a capture folder with the traffic of another target."""
        if is_left_to_vllm(self._target):
            self._target_folder("--capture")
        if capture.folder is not None and (capture.folder / INFO).exists():
            try:
                info = info_of_target(self._target, self._target_folder("--capture"))
                require_same_target(capture.folder, info)
            except ShardError as problem:
                raise SettingsError(f"--capture: {problem}") from None


def _sampling_workaround(target: str, flags: list[str], notes: list[str]) -> list[str]:
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


def _seed_scheduler(target: str, flags: list[str], notes: list[str]) -> list[str]:
    """On CPUs, flags for the scheduler that keeps seeded requests from ending the server."""
    from vllm.platforms import current_platform

    parsed = parse(target, flags)
    if not current_platform.is_cpu() or parsed.scheduler_cls is not None:
        return []
    if parsed.enable_chunked_prefill is False and not parsed.long_prefill_token_threshold:
        return []
    notes.insert(0, "on CPUs seeds are ignored unless --no-enable-chunked-prefill: docs/limits.md")
    return ["--scheduler-cls", SCHEDULER]


def _require_object_store(upload: str | None) -> None:
    """Refuse a folder for captured traffic: files of a storage are readable for everyone."""
    if upload is not None and (not is_url(upload) or upload.startswith(("file://", "local://"))):
        raise SettingsError(
            f"--capture-upload {upload} is a folder, expected the URL of an object store such as "
            "s3://BUCKET/PREFIX. Name one, or remove --capture-upload: --capture keeps the traffic "
            "in a folder that only you can read."
        )


def _current_version(
    settings: ServeSettings, place: str, target: Path, drafter: str | None, notes: list[str]
) -> str:
    """The folder of the version that the registry points to; `target` is the target's."""
    if drafter is not None:
        raise SettingsError(
            f"--registry cannot be combined with the drafter {drafter}. Remove --draft, or publish "
            "the drafter with `leadout learn --start`."
        )
    registry = Registry(resolved(place), read_key(settings.registry_key))
    pointed = registry.require_pointer().version
    try:
        version, problem = version_to_start_with(registry, target)
    except StorageError:  # not now: this is nothing that is wrong with the registry
        raise
    except LeadoutError as found:
        raise RegistryError(f"--registry {place}: {found}") from None
    if problem is not None:
        notes.append(f"--registry: version {pointed} cannot be served: {problem}")
    notes.append(f"--registry: version {version}, later versions as they are promoted")
    return str(registry.path(version))

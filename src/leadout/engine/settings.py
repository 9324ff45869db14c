"""Settings of `leadout serve`, and of Leadout's parts inside a vLLM server.

The parts get theirs through vLLM's `additional_config`, which vLLM hands unchanged to all of its
processes: `{"leadout": {SECTION: {...}}}`. A part is switched on by its section; a missing value is
the default. Importing this needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.control.prompt_lookup import MIN_MATCH
from leadout.errors import LeadoutError, shortened, shown
from leadout.registry import Registry, RegistryKey
from leadout.settings import Settings, setting
from leadout.storage import Place, resolved

LIVE, CAPTURE, REGISTRY, DRAFT_TABLE = "live", "capture", "registry", "draft_table"
CALIBRATION, STATES, LEARN = "calibration", "states", "learn"
LEARN_STATES = "learn-states"  # the worker's counters
# vLLM's `scheduler_cls` for every part that works in the scheduler.
SCHEDULER = "leadout.engine.scheduler.make_scheduler"
# vLLM's `worker_cls` for a server that may stop drafting, on the V2 runner.
IDLE_DRAFTER_WORKER = "leadout.engine.idle_drafter.IdleDrafterWorker"
# vLLM's `worker_cls` for a server whose states are learnt from; includes the one above.
STATES_TAP_WORKER = "leadout.engine.states_tap.StatesTapWorker"
# vLLM's `worker_extension_cls` for a server whose drafter can be swapped.
WORKER_EXTENSION = "leadout.engine.hot_swap.SwapExtension"

# Entry points under which installed packages offer redactors. A setting names one of them, so it
# cannot load any other code.
REDACTORS = "leadout.redactors"
# From the token ids of a prompt and its response to those that may be kept; None drops both.
Redactor: TypeAlias = Callable[[list[int], list[int]], tuple[list[int], list[int]] | None]


class EngineSettingsError(LeadoutError):
    """A value in `additional_config` that Leadout does not understand."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LiveSettings(Section):
    """Live control: how much to draft and verify in every step."""

    tuned: Path | None = None  # file of `leadout tune`, to start from its measurements
    # Prompt lookup: how many tokens at the end of a request must have occurred earlier in it, for
    # the tokens that followed there to become the draft. 0 switches prompt lookup off.
    prompt_lookup_min_match: int = Field(default=MIN_MATCH, ge=0)


class CaptureSettings(Section):
    """Capture: keep the token ids of finished requests in a folder."""

    folder: Path | None = None
    upload: Place | None = None  # where finished files are moved to
    rate: float = Field(default=1.0, gt=0, le=1)  # fraction of the requests
    max_bytes: int = Field(default=1 << 30, ge=1 << 16)
    max_days: float = Field(default=30.0, gt=0)
    key: Path | None = None  # file with keys that encrypt what is kept
    redactor: str | None = None  # an entry point in the group `leadout.redactors`


class RegistrySettings(Section):
    """Rollout: follow the pointer of a registry."""

    folder: Place  # or URL
    key: Path | None = None  # only versions that it has signed are served


class DraftTableSettings(Section):
    """The table of draft lengths of a server with data parallelism and a dense target.

    vLLM drops the table because ranks that draft different lengths would wait for each other for
    ever. Ranks of a dense target do not wait for each other; each becomes an engine of its own,
    and Leadout gives it the table again.
    """

    rows: tuple[tuple[int, int, int], ...]  # first batch size, last batch size, K


class CalibrationSettings(Section):
    """Calibration: draft what the requests of `leadout tune` ask for, and record each step."""

    folder: Path  # for the records
    max_batch: int = Field(ge=1)  # the largest batch that is measured


class StatesSettings(Section):
    """Hidden states: write those of every request into a folder."""

    folder: Path
    # Ascending; the last one is the target's last layer.
    layer_ids: tuple[int, ...] = Field(min_length=1)
    target_fingerprint: str
    fp8: bool = False
    max_bytes: int = Field(default=4 << 30, ge=1 << 16)  # of files that wait to be read
    max_seconds: float = Field(default=600.0, gt=0)  # until an unread file may be removed


class LearnSettings(Section):
    """Learning from served states: write texts and states into a ring in shared memory."""

    folder: Path
    rate: float = Field(default=0.1, gt=0, le=1)  # fraction of the requests
    max_bytes: int = Field(default=1 << 30, ge=1 << 20)  # of the states of one engine
    # What the ring's `RingInfo` says.
    server_id: str = Field(min_length=16)
    target: str
    target_fingerprint: str
    layer_ids: tuple[int, ...] = Field(min_length=1)
    hidden_size: int = Field(ge=1)
    dtype: Literal["bfloat16", "float32", "float8"]
    window: int | None = None


_Section = TypeVar("_Section", bound=Section)


def sections_of(vllm_config: Any) -> Mapping[str, Any]:
    """The sections by name; empty for a server without any."""
    additional = vllm_config.additional_config
    return additional.get("leadout", {}) if isinstance(additional, dict) else {}


def read_section(vllm_config: Any, name: str, kind: type[_Section]) -> _Section:
    """A section; its defaults if it is missing."""
    try:
        return kind.model_validate(sections_of(vllm_config).get(name, {}))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = shortened(".".join(str(part) for part in ("leadout", name, *first["loc"])))
        raise EngineSettingsError(
            f"additional_config: {field} is {shown(first['input'])}: {first['msg']}. Correct it, "
            "or leave it out for the default."
        ) from None


def restore_draft_table(vllm_config: Any) -> None:
    """Give an engine of a server with data parallelism its table of draft lengths, if it has one.

    To be called before vLLM reads the table: by the scheduler, and by the worker before it captures
    graphs.
    """
    if DRAFT_TABLE not in sections_of(vllm_config):
        return
    if vllm_config.parallel_config.data_parallel_size > 1:  # ranks that wait for each other
        return
    rows = read_section(vllm_config, DRAFT_TABLE, DraftTableSettings).rows
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = list(rows)


def with_section(additional: Mapping[str, Any], name: str, settings: Section) -> dict[str, Any]:
    """`additional_config` with one more section; what it already has stays."""
    ours = additional.get("leadout", {})
    section = ours.get(name, {}) | settings.model_dump(mode="json", exclude_defaults=True)
    return {**additional, "leadout": {**ours, name: section}}


def load_redactor(name: str | None) -> Redactor:
    """The installed redactor of that name; without a name, one that keeps everything."""
    if name is None:
        return lambda prompt, response: (prompt, response)
    installed = {point.name: point for point in entry_points(group=REDACTORS)}
    if name not in installed:
        raise EngineSettingsError(
            f"additional_config: leadout.capture.redactor is {name!r}, expected one of "
            f"{sorted(installed)} (entry points of the group {REDACTORS}). Install the package "
            "that provides it."
        )
    redactor: Redactor = installed[name].load()
    return redactor


def followed_registry(vllm_config: Any) -> Registry | None:
    """The registry whose pointer this server follows, if any."""
    if REGISTRY not in sections_of(vllm_config):
        return None
    settings = read_section(vllm_config, REGISTRY, RegistrySettings)
    return Registry(settings.folder, read_key(settings.key))


def read_key(path: Path | None) -> RegistryKey | None:
    return None if path is None else RegistryKey.read(path)


def version_of_drafter(registry: Registry, drafter: str) -> int | None:
    """The version whose folder this is; `leadout serve --registry` gives vLLM such a folder."""
    folder = Path(drafter)
    is_one = folder.name.isdigit() and registry.path(int(folder.name)) == folder
    return int(folder.name) if is_one else None


_DRAFTER, _LENGTH, _CAPTURE, _STATES = "Drafter", "Draft length", "Capture", "Hidden states"
_LEARN = "Learning from served states"


class ServeSettings(Settings):
    command: ClassVar[str] = "serve"

    target: str = setting(
        ...,
        "Folder or hub name of the target model, or of a speculators-format drafter that names "
        "its target.",
        panel="argument",
    )
    draft: str | None = setting(
        None,
        "Folder or hub name of the drafter; 'auto': a published one.",
        panel=_DRAFTER,
        metavar="DRAFTER",
    )
    registry: Place | None = setting(
        None,
        "Registry of `leadout learn`, a folder or an s3:// URL: serve its current drafter and swap "
        "in new versions.",
        panel=_DRAFTER,
        metavar="PLACE",
    )
    registry_key: Path | None = setting(
        None,
        "File with the public key of the registry: serve only versions that it has signed.",
        panel=_DRAFTER,
    )
    if_unfit: Literal["refuse", "bare"] = setting(
        "refuse",
        "What to do with a drafter that does not fit: refuse to serve, or serve without it.",
        panel=_DRAFTER,
    )
    tuned: Path | None = setting(
        None,
        "File written by `leadout tune`: how many tokens to draft at which batch size.",
        panel=_LENGTH,
    )
    live: bool = setting(
        False,
        "Choose the draft length at every step, from measured costs and acceptance.",
        panel=_LENGTH,
    )
    capture: Path | None = setting(
        None,
        "Folder in which to keep the token ids of finished requests. Off by default.",
        panel=_CAPTURE,
    )
    capture_upload: Place | None = setting(
        None,
        "s3:// URL to which finished files of --capture are moved, for `leadout learn --traffic`.",
        panel=_CAPTURE,
        metavar="URL",
    )
    capture_rate: float = setting(
        1.0, "Fraction of the requests to capture.", panel=_CAPTURE, ge=0.0001, le=1
    )
    capture_key: Path | None = setting(
        None,
        "File with keys, one in each line: the first one encrypts what is kept. Default: the "
        "variable LEADOUT_CAPTURE_KEY, if it is set.",
        panel=_CAPTURE,
    )
    learn_states: Path | None = setting(
        None,
        "Folder in shared memory, such as /dev/shm/leadout-ring: texts and hidden states of "
        "requests are kept there for `leadout learn --states`, the oldest overwritten.",
        panel=_LEARN,
        metavar="RING",
    )
    learn_rate: float = setting(
        0.1, "Fraction of the requests to learn from.", panel=_LEARN, ge=0.0001, le=1
    )
    learn_states_fp8: bool = setting(
        False,
        "Keep the states in FP8 with a scale per token and layer: half the bytes.",
        panel=_LEARN,
    )
    learn_ring_gib: float = setting(
        1.0, "GiB of shared memory for the states of each engine.", panel=_LEARN, ge=0.001
    )
    states: bool = setting(
        False,
        "Hand out the target's hidden states, for `leadout train --states-from`.",
        panel=_STATES,
    )
    layers: tuple[int, ...] | None = setting(
        None,
        "Layer whose output is handed out; repeatable. The last layer always is. [default: 5 "
        "layers, evenly spaced, as `leadout train` taps them]",
        panel=_STATES,
    )
    states_fp8: bool = setting(
        False,
        "Hand out states in FP8 with a scale per token and layer: half the bytes.",
        panel=_STATES,
    )
    states_folder: Path | None = setting(
        None,
        "Folder in which states wait to be read. [default: one in shared memory]",
        panel=_STATES,
    )
    states_backlog: float = setting(
        4.0,
        "GiB of states that may wait to be read; further requests wait.",
        panel=_STATES,
        gt=0,
    )
    vllm_flags: tuple[str, ...] = setting((), "Flags for vLLM's server.", panel="hidden")

    @property
    def capture_settings(self) -> CaptureSettings | None:
        if self.capture is None:
            return None
        upload = None if self.capture_upload is None else resolved(self.capture_upload)
        return CaptureSettings(
            folder=self.capture.resolve(),
            upload=upload,
            rate=self.capture_rate,
            key=None if self.capture_key is None else self.capture_key.resolve(),
        )

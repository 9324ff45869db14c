"""Flags of vLLM: what the user's mean, and which ones switch Leadout's features on.

The user's flags go through vLLM's own parser, so that Leadout sees what the server will see. A
flag that vLLM does not know is refused: it may be a misspelt flag of Leadout's.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NoReturn

from leadout.dflash.config import DrafterConfig
from leadout.engine.settings import (
    CALIBRATION,
    CAPTURE,
    DRAFT_TABLE,
    LEARN,
    LIVE,
    REGISTRY,
    SCHEDULER,
    STATES,
    WORKER_EXTENSION,
    CalibrationSettings,
    CaptureSettings,
    DraftTableSettings,
    LearnSettings,
    LiveSettings,
    RegistrySettings,
    Section,
    ServeSettings,
    StatesSettings,
    load_redactor,
    with_section,
)
from leadout.errors import LeadoutError
from leadout.settings import Settings, SettingsError

_UNRECOGNIZED = "unrecognized arguments: "  # argparse's message
# vLLM's flags for single fields of --speculative-config, as its parser names them.
_SPECULATION_FIELDS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
_SPECULATION = {
    "--speculative-config",
    "-sc",
    *(f"--{name.replace('_', '-')}" for name in _SPECULATION_FIELDS),
}


def parse(target: str, flags: Sequence[str], command: type[Settings] = ServeSettings) -> Any:
    """The flags as vLLM's server parses them; refuses unknown and abbreviated ones.

    vLLM accepts any unambiguous beginning of its flags. Leadout does not: `--live-m` is more
    likely a misspelt flag of Leadout's than an abbreviation. `command` is the one that got them.
    """
    return _checked(_parser(command).parse_args(["--model", target, *flags]), target, command)


_NOT_GIVEN = object()
# Destinations of vLLM's parser that are no flags of the engine and need no refusal.
_NO_FLAGS = ("model", "model_tag", "config")
# Commands find and download the target themselves, before they start an engine.
_OF_FILES = {
    "revision": "download that revision and name its folder",
    "download_dir": "set HF_HUB_CACHE instead",
}


def engine_arguments(
    target: str,
    flags: Sequence[str],
    command: type[Settings] = ServeSettings,
    fixed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The arguments of an engine in this process that these flags of `vllm serve` set.

    Only what the flags name is in the result, so that defaults of the caller stay. `fixed` are
    arguments that the command sets itself, each with what to use instead of vLLM's flag.
    """
    if not flags:
        return {}
    from vllm.engine.arg_utils import EngineArgs

    parser = _parser(command)
    unset = Namespace(**{action.dest: _NOT_GIVEN for action in parser._actions})
    # A positional argument that is missing is set to its default nevertheless.
    unset.model_tag = None
    parsed = _checked(parser.parse_args(["--model", target, *flags], unset), target, command)
    given = {
        name: value
        for name, value in vars(parsed).items()
        if value is not _NOT_GIVEN and name not in _NO_FLAGS
    }
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    refused = {**_OF_FILES, **(fixed or {})}
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if name not in known:
            raise SettingsError(
                f"{flag} is a flag of vLLM's server, but `leadout {command.command}` starts an "
                "engine without a server. Remove it."
            )
        if name in refused:
            raise SettingsError(
                f"`leadout {command.command}` does not accept {flag} among vLLM's flags; "
                f"{refused[name]}."
            )
    return given


def _parser(command: type[Settings]) -> Any:
    from leadout.engine.vllm_adapter import FlexibleArgumentParser, make_arg_parser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            if message.startswith(_UNRECOGNIZED):
                unknown = message.removeprefix(_UNRECOGNIZED).split()[0]
                known = list(self._option_string_actions)
                raise SettingsError(_unknown_flag(unknown, known, command))
            raise SettingsError(f"vLLM refuses its flags: {message}. {_help(command)}")

    return make_arg_parser(Parser(allow_abbrev=False))


def _checked(parsed: Namespace, target: str, command: type[Settings]) -> Namespace:
    if parsed.model_tag is not None:  # what `vllm serve` takes for the model
        raise SettingsError(_unknown_flag(parsed.model_tag, [], command))
    if parsed.model != target:
        raise SettingsError(
            f"--model {parsed.model} among vLLM's flags would replace the target {target}. Remove "
            "it, or pass it as the target."
        )
    return parsed


def _help(command: type[Settings]) -> str:
    return f"See `leadout {command.command} --help` and `vllm serve --help=all`."


def _unknown_flag(word: str, vllm_flags: Sequence[str], command: type[Settings]) -> str:
    flags = command.flags()
    if not word.startswith("-"):
        arguments = " and ".join(each for each in flags if not each.startswith("--"))
        draft = " Name the drafter with --draft." if "--draft" in flags else ""
        return (
            f"Unexpected argument {word}: `leadout {command.command}` takes {arguments} "
            f"only.{draft} {_help(command)}"
        )
    name = word.partition("=")[0]
    ours = [*(each for each in flags if each.startswith("--")), "--plan"]
    nearest = difflib.get_close_matches(name, ours, n=1, cutoff=0.7)
    nearest = nearest or difflib.get_close_matches(name, vllm_flags, n=1)
    suggestion = f" Did you mean {nearest[0]}?" if nearest else ""
    return (
        f"{name} is not a flag of `leadout {command.command}` or of vLLM; flags must be written in "
        f"full.{suggestion} {_help(command)}"
    )


def vllm_config_of(target: str, flags: Sequence[str]) -> Any:
    """The config that vLLM makes of these flags on this machine, without loading a weight."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = AsyncEngineArgs.from_cli_args(parse(target, flags))
    try:
        return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, NotImplementedError, OSError) as problem:
        raise SettingsError(f"vLLM refuses these settings: {problem}") from problem


def without_speculation(flags: Sequence[str]) -> list[str]:
    return _without(flags, is_speculation)


def without_revision(flags: Sequence[str]) -> list[str]:
    return _without(flags, lambda flag: flag.partition("=")[0] == "--revision")


def _without(flags: Sequence[str], is_dropped: Callable[[str], bool]) -> list[str]:
    """The flags but some, each of which has a value."""
    kept, skip_value = [], False
    for flag in flags:
        if skip_value:
            skip_value = False
        elif is_dropped(flag):
            skip_value = "=" not in flag
        else:
            kept.append(flag)
    return kept


def is_speculation(flag: str) -> bool:
    """A flag of speculation, also with `=VALUE`, underscores, or a dotted field."""
    name = flag.partition("=")[0].replace("_", "-")
    return name.partition(".")[0] in _SPECULATION


def speculation_of(parsed: Any) -> dict[str, Any]:
    """The fields of speculation in all flags, as `parse` returns them."""
    stated = parsed.speculative_config or {}
    fields = {name.replace("-", "_"): value for name, value in stated.items()}  # as vLLM does
    for name, field in _SPECULATION_FIELDS.items():
        value = getattr(parsed, name)
        if value is None:
            continue
        if field in fields:
            raise SettingsError(
                f"--{name.replace('_', '-')} {value} cannot be combined with {field} "
                f"{fields[field]} in --speculative-config. Remove one of the two."
            )
        fields[field] = value
    return fields


LOCAL_ARGMAX = "use_local_argmax_reduction"


def draft_selection(
    speculation: Mapping[str, Any], vllm_config: Any, drafter: DrafterConfig
) -> dict[str, bool]:
    """The field with which vLLM chooses drafts without logits over the target's vocabulary.

    Otherwise every draft has a row of them, with minus infinity for tokens that the drafter lacks,
    which is gathered from all tensor-parallel ranks. Empty where that saves nothing, and where the
    logits are needed.
    """
    is_parallel = vllm_config.parallel_config.tensor_parallel_size > 1
    needs_logits = speculation.get("enable_adaptive_verification") or (
        speculation.get("draft_sample_method", "greedy") != "greedy"
    )
    saves_work = drafter.draft_vocab_size is not None or is_parallel
    if LOCAL_ARGMAX in speculation or needs_logits or not saves_work:
        return {}
    return {LOCAL_ARGMAX: True}


# Features of Leadout that need flags or environment variables of vLLM.

PLUGINS = "VLLM_PLUGINS"
_RUST = "VLLM_USE_RUST_FRONTEND"
ENDPOINTS = "vllm.endpoint_plugins"
# Groups of which vLLM loads everything unless VLLM_PLUGINS is set.
FILTERED = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


@dataclass(frozen=True)
class Features:
    """The features that a server runs with; None: off."""

    live: LiveSettings | None = None
    capture: CaptureSettings | None = None
    registry: RegistrySettings | None = None
    draft_table: DraftTableSettings | None = None
    calibration: CalibrationSettings | None = None
    states: StatesSettings | None = None
    learn: LearnSettings | None = None

    def sections(self) -> dict[str, Section]:
        """Their settings, by the name of their section in vLLM's additional_config."""
        features = {
            LIVE: self.live,
            CAPTURE: self.capture,
            REGISTRY: self.registry,
            DRAFT_TABLE: self.draft_table,
            CALIBRATION: self.calibration,
            STATES: self.states,
            LEARN: self.learn,
        }
        return {name: each for name, each in features.items() if each is not None}


def feature_flags(features: Features, parsed: Any) -> list[str]:
    """The flags for these features; `parsed` are the user's, from `parse`."""
    sections = features.sections()
    if not sections:
        return []
    additional = dict(parsed.additional_config or {})
    for name, settings in sections.items():
        additional = with_section(additional, name, settings)
    flags = []
    first = next(iter(sections))
    if first != STATES:  # which has no part in the scheduler, and is alone
        names = {DRAFT_TABLE: "--tuned", CALIBRATION: "`leadout tune`", LEARN: "--learn-states"}
        _require_default(names.get(first, f"--{first}"), parsed, "scheduler_cls")
        flags += ["--scheduler-cls", SCHEDULER]
    for name in (REGISTRY, STATES):
        if name in sections:
            _require_python_api(f"--{name}", parsed)
    if REGISTRY in sections:
        _require_default("--registry", parsed, "worker_extension_cls")
        _require_one("--registry", parsed, "pipeline_parallel_size")
        _require_one("--registry", parsed, "api_server_count")
        if parsed.data_parallel_size > 1 and parsed.api_server_count is None:
            flags += ["--api-server-count", "1"]  # else vLLM starts one for each rank
        flags += ["--worker-extension-cls", WORKER_EXTENSION]
    if LEARN in sections:  # the drafter, and so the states, are on the last rank only
        _require_one("--learn-states", parsed, "pipeline_parallel_size")
        _require_one("--learn-states", parsed, "prefill_context_parallel_size")
    if CAPTURE in sections:  # find out now what the server would find out after its start
        try:
            capture = CaptureSettings.model_validate(additional["leadout"][CAPTURE])
            load_redactor(capture.redactor)
        except (LeadoutError, ValueError) as problem:
            raise SettingsError(f"--capture: {problem}") from None
    return [*flags, "--additional-config", json.dumps(additional)]


def feature_environment(
    features: Features, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables to add. vLLM loads endpoints only of packages that VLLM_PLUGINS names.

    Once that is set, vLLM loads nothing else, so everything that it loads without it is named too.
    """
    if features.registry is None and features.states is None:
        return {}
    if PLUGINS in environment:
        named = environment[PLUGINS].split(",")
    else:
        named = sorted({point.name for group in FILTERED for point in entry_points(group=group)})
    return {PLUGINS: ",".join(dict.fromkeys([*filter(None, named), "leadout"]))}


def newly_loaded_endpoints(added: Mapping[str, str]) -> list[str]:
    """Endpoint plugins of other packages that load only because VLLM_PLUGINS must name them."""
    if PLUGINS in os.environ or PLUGINS not in added:
        return []
    named = added[PLUGINS].split(",")
    found = {point.name for point in entry_points(group=ENDPOINTS)}
    return sorted(found & set(named) - {"leadout"})


def _require_default(feature: str, parsed: Any, name: str) -> None:
    value = getattr(parsed, name)
    if value:
        flag = f"--{name.replace('_', '-')}"
        raise SettingsError(
            f"{feature} cannot be combined with {flag} {value}, because it sets {flag} itself. "
            "Remove one of the two."
        )


def _require_python_api(feature: str, parsed: Any) -> None:
    """Its routes and the thread that follows a registry live in vLLM's own API server."""
    others = {"--grpc": getattr(parsed, "grpc", False), _RUST: os.environ.get(_RUST, "0") != "0"}
    for name, is_used in others.items():
        if is_used:
            raise SettingsError(
                f"{feature} cannot be combined with {name}: it needs vLLM's HTTP server in Python. "
                "Remove one of the two."
            )


def _require_one(feature: str, parsed: Any, name: str) -> None:
    value = getattr(parsed, name, None)
    if value is not None and value > 1:
        flag = f"--{name.replace('_', '-')}"
        raise SettingsError(
            f"{feature} requires {flag} 1, got {value}; change {flag}, or remove {feature}."
        )

"""What a drafter becomes in a server: the flags with which vLLM drafts, or why it cannot.

How many tokens it drafts (K, or a table of K by batch size), the worker that suits this, room for
the drafts in a step, and CUDA graphs for all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadout.checkpoints import Checkpoint
from leadout.control.policy import ladder_up_to
from leadout.control.tuned_file import Range, Tuned
from leadout.engine.cuda_graphs import flags_for_all_batches, graph_notes
from leadout.engine.pair import pair_of, planned_pair, raise_if_unfit
from leadout.engine.settings import (
    IDLE_DRAFTER_WORKER,
    STATES_TAP_WORKER,
    CalibrationSettings,
    DraftTableSettings,
    ServeSettings,
)
from leadout.engine.tuned_plan import (
    DRAFT_LENGTH,
    DRAFT_LENGTH_BY_BATCH,
    NOTHING_TO_DRAFT,
    below_break_even,
    differences_from_measurement,
    served_table,
    tuned_speculation,
    with_graphs_for,
)
from leadout.engine.vllm_flags import draft_selection, parse, vllm_config_of
from leadout.findings import Severity
from leadout.pairing import examine
from leadout.settings import SettingsError


@dataclass(frozen=True)
class Drafting:
    """The flags of a server that drafts, and what goes with them."""

    flags: list[str]
    config: Any  # vLLM's of these flags, but for the sizes of CUDA graphs
    draft_table: DraftTableSettings | None  # which vLLM would drop


def plan_drafting(
    settings: ServeSettings,
    calibration: CalibrationSettings | None,
    target: str,
    flags: list[str],
    speculation: dict[str, Any],
    tuned: Tuned | None,
    checkpoint: Checkpoint,
    notes: list[str],
) -> Drafting | None:
    """The server for this pair, corrected where possible, else an error; None if it never drafts.

    `flags` are vLLM's without those of speculation, and `speculation` names the drafter.
    """
    is_live = settings.live
    config = vllm_config_of(target, flags)
    for name in ("live", "registry", "tuned"):
        if getattr(settings, name):
            _require_independent_ranks(f"--{name}", config)
    if tuned is not None:
        notes += differences_from_measurement(tuned, config)
        notes += below_break_even(tuned, config.scheduler_config.max_num_seqs)
    if tuned is None or is_live:
        asked = speculation.get(DRAFT_LENGTH)
        if calibration is not None:
            asked = checkpoint.config.max_draft_tokens
        lengths: dict[str, Any] = {DRAFT_LENGTH: _draft_tokens(asked, checkpoint, notes)}
        if is_live or calibration is not None:
            lengths |= ladder_table(lengths[DRAFT_LENGTH], speculation, config)
        if is_live:
            _refuse_adaptive_verification(speculation)
            start = "the costs in the tuned file" if tuned else "its own measurements only"
            notes.append(f"--live: K is the maximum; chosen at every step, starting from {start}")
    else:
        lengths = tuned_speculation(tuned, config)
        if not lengths:
            notes.append(NOTHING_TO_DRAFT)
            return None
        notes.append(f"--tuned: {json.dumps(lengths)}")
    speculation = {**speculation, **lengths}
    speculation |= draft_selection(speculation, config, checkpoint.config)
    draft_tokens, table = lengths[DRAFT_LENGTH], speculation.get(DRAFT_LENGTH_BY_BATCH)
    if settings.learn_states is not None:  # does what the other one does too
        flags = [*flags, "--worker-cls", STATES_TAP_WORKER]
    elif table:
        flags = [*flags, *_idle_drafter(target, flags, config)]
    # Leadout's rules first: vLLM's own errors name neither a rule nor a remedy.
    raise_if_unfit(examine(planned_pair(config, checkpoint, draft_tokens)))
    draft_table = None
    if config.parallel_config.data_parallel_size > 1 and DRAFT_LENGTH_BY_BATCH in lengths:
        # vLLM would drop it; Leadout's parts in the engines set it.
        draft_table = DraftTableSettings(rows=speculation.pop(DRAFT_LENGTH_BY_BATCH))
    flags = [*flags, "--speculative-config", json.dumps(speculation)]
    config = vllm_config_of(target, flags)
    if room := _room_for_drafts(target, flags, config, notes):
        flags = [*flags, *room]
        config = vllm_config_of(target, flags)
    findings = examine(pair_of(config))
    notes += [str(finding) for finding in findings if finding.severity is Severity.WARNING]
    raise_if_unfit(findings)
    if calibration is not None:  # the graphs that `serve --tuned` will have
        ladder = ladder_up_to(draft_tokens)
        every_k: list[Range] = [(1, calibration.max_batch, k) for k in ladder]
        parsed = parse(target, flags)
        flags = with_graphs_for(every_k, parsed, flags, config, notes)
    elif tuned is not None and not is_live:
        measured = served_table(tuned, config)
        flags = with_graphs_for(measured, parse(target, flags), flags, config, notes)
    else:
        # With live control of the largest K: those of the others end later.
        notes += graph_notes(config)[: 1 if is_live else None]
        if table:  # Leadout's ladder, or the user's own
            lengths_in_use = {min(k, draft_tokens) for _, _, k in table}
            flags += flags_for_all_batches(parse(target, flags), config, lengths_in_use)
    return Drafting(flags, config, draft_table)


def _require_independent_ranks(flag: str, vllm_config: Any) -> None:
    """Refuse data parallelism whose ranks wait for each other, as those of experts do."""
    ranks = vllm_config.parallel_config.data_parallel_size
    if ranks > 1 and vllm_config.model_config.is_moe:
        raise SettingsError(
            f"{flag} with a mixture of experts requires --data-parallel-size 1, got {ranks}: its "
            f"ranks must draft in step with each other. Start one server per replica, or remove "
            f"{flag}."
        )


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


def _refuse_adaptive_verification(speculation: Mapping[str, Any]) -> None:
    """Live control would count drafts as rejected that only the GPU knows were not verified."""
    if speculation.get("enable_adaptive_verification"):
        raise SettingsError(
            "--live cannot be combined with enable_adaptive_verification in --speculative-config: "
            "both decide how many drafts a step verifies, and vLLM does not tell live control what "
            "the other one left out. Remove one of the two."
        )


def ladder_table(
    max_drafts: int, speculation: Mapping[str, Any], vllm_config: Any
) -> dict[str, Any]:
    """vLLM's table of K by batch size for live control; empty where it has no effect.

    vLLM's V2 runner captures full graphs for every K in the table. Live control then chooses among
    them at every step, whatever the batch size, so the table itself only matters if live control
    is off: the largest K at almost all batch sizes, the others at the largest ones.
    """
    sequences = vllm_config.scheduler_config.max_num_seqs
    if not vllm_config.use_v2_model_runner or sequences < 2 or DRAFT_LENGTH_BY_BATCH in speculation:
        return {}
    lower = ladder_up_to(max_drafts)[-2::-1]  # from below the largest down to 0
    if sequences <= len(lower):  # a row for each: keep 0 and as many of the largest as fit
        lower = (*lower[: sequences - 2], 0)
    first = sequences - len(lower)
    rows = [(first + 1 + index, first + 1 + index, k) for index, k in enumerate(lower)]
    return {DRAFT_LENGTH_BY_BATCH: [(1, first, max_drafts), *rows]}


def _idle_drafter(target: str, flags: list[str], vllm_config: Any) -> list[str]:
    """On the V2 runner, flags for the worker whose drafter suits a table of K."""
    if not vllm_config.use_v2_model_runner:
        return []
    if parse(target, flags).worker_cls != "auto":  # the user's own
        return []
    return ["--worker-cls", IDLE_DRAFTER_WORKER]


def _room_for_drafts(target: str, flags: list[str], config: Any, notes: list[str]) -> list[str]:
    """Flags with which the longest prompt and its drafts fit into a step, if they must.

    Without chunked prefill vLLM 0.32 accepts a prompt that does not, and it and all requests
    behind it wait for ever.
    """
    scheduling, length = config.scheduler_config, config.model_config.max_model_len
    needed = length + config.speculative_config.max_num_new_slots_for_drafting
    if scheduling.enable_chunked_prefill or scheduling.max_num_batched_tokens >= needed:
        return []
    if parse(target, flags).max_num_batched_tokens is not None:
        raise SettingsError(
            f"--max-num-batched-tokens is {scheduling.max_num_batched_tokens}, but without chunked "
            f"prefill expected at least {needed}: the longest prompt ({length} tokens) and its "
            "drafts, or long prompts would wait for ever. Raise it, lower --max-model-len, or "
            "remove --no-enable-chunked-prefill."
        )
    notes.append(f"--max-num-batched-tokens {needed}: the longest prompt and its drafts")
    return ["--max-num-batched-tokens", str(needed)]

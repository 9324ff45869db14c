"""What vLLM and Leadout resolve on a faked GPU: one row for each way to start a server.

    python -m support.gpu_resolution H100

prints the rows as JSON. Each row of `leadout serve` is compared with that of plain vLLM with the
same drafter and flags; a field that differs needs a reason in REASONS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from support.models import ROOT

DRAFT_TOKENS = 15  # as published drafters have, with blocks of 16
# Of the tuned file: its table has several K, but not the largest, up to more requests than vLLM's
# capture sizes cover on some GPUs.
ACCEPTANCE = [0.8] * 12 + [0.1] * 3
TUNED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BARE, DFLASH = "vllm", "vllm, DFlash"
# A table of K of the user's: lengths that do not divide each other, without the largest.
OWN_TABLE = "a table of K"
TABLE = f"{DFLASH}, {OWN_TABLE}"
TABLE_ROWS = [(1, 16, 11), (17, 64, 6), (65, 256, 2)]
# Fields that Leadout changes, with the reason, by the flag of `leadout serve` that causes it.
_MORE_GRAPHS = "graphs are captured for several K instead of one"
REASONS: dict[str, dict[str, str]] = {
    "--live": {
        "full_graphs": "a ladder of K is declared to vLLM, which captures full graphs for each of "
        "them; live control chooses among them at every step",
        "graphs": _MORE_GRAPHS,
        "capture_sizes": "vLLM adds sizes for a table of K, with which graphs of one K would keep "
        "another from its own; these do not",
    },
    "--tuned": {
        "full_graphs": "vLLM captures full graphs for each K in the table of the tuned file",
        "graphs": _MORE_GRAPHS,
        "capture_sizes": "sizes are added for all batches that were measured",
        "drafter_graphs": "the added sizes cover the drafter at all batches that were measured",
    },
}


@dataclass(frozen=True)
class Mode:
    """A way to start a server, and that of plain vLLM to compare it with."""

    leadout: tuple[str, ...]  # flags of `leadout serve`; empty: `leadout serve TARGET`
    vllm: tuple[str, ...] = ()  # further flags, for both
    has_table: bool = False  # in --speculative-config, for both

    @property
    def name(self) -> str:
        words = " ".join(("leadout", *self.leadout, *self.vllm))
        return f"{words}, {OWN_TABLE}" if self.has_table else words

    @property
    def compared_with(self) -> str:
        if self.has_table:
            return TABLE
        return " ".join((DFLASH if self.has_drafter else BARE, *self.vllm))

    @property
    def speculation(self) -> dict[str, Any]:
        """What the user's flags say."""
        return {"num_speculative_tokens_per_batch_size": TABLE_ROWS} if self.has_table else {}

    @property
    def has_drafter(self) -> bool:
        return bool({"--draft", "--registry"} & set(self.leadout))

    def reason(self, field: str) -> str | None:
        # With --live a tuned file is only where it starts from.
        for flag in sorted(self.leadout, key=lambda each: each != "--live"):
            if field in REASONS.get(flag, {}):
                return REASONS[flag][field]
        return None


MODES = (
    Mode(()),
    Mode(("--capture",)),
    Mode(("--draft",)),
    Mode(("--draft", "--capture")),
    Mode(("--draft", "--tuned")),
    Mode(("--draft", "--live")),
    Mode(("--draft", "--tuned", "--live")),
    Mode(("--registry",)),
    Mode(("--registry", "--live", "--capture")),
    Mode(("--draft",), ("--max-num-batched-tokens", "8192")),
    Mode(("--draft", "--live"), ("--max-num-batched-tokens", "8192")),
    Mode(("--draft", "--live"), ("--tensor-parallel-size", "4")),
    Mode(("--draft", "--live"), ("--data-parallel-size", "2")),
    Mode(("--draft", "--tuned"), ("--data-parallel-size", "2")),
    Mode(("--draft",), ("--dtype", "float16")),
    Mode(("--draft", "--live"), ("--max-num-seqs", "64")),
    Mode(("--draft", "--live"), ("--enforce-eager",)),
)
# Not one of the committed table: a test compares it with plain vLLM's row.
WITH_TABLE = Mode(("--draft",), has_table=True)


def rows_on(gpu: str) -> list[dict[str, Any]]:
    """The rows of one GPU, resolved in a process of its own."""
    return _resolved_on(gpu)[:-1]


def rows_with_table(gpu: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of plain vLLM and of `leadout serve`, with a table of K of the user's."""
    rows = _resolved_on(gpu)
    return next(row for row in rows if row["mode"] == TABLE), rows[-1]


@cache  # the table of the user's is resolved last, in the same process
def _resolved_on(gpu: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run_on_fake_gpu("support.gpu_resolution", gpu)
    return rows


def run_on_fake_gpu(module: str, gpu: str, *arguments: str) -> Any:
    """What a module of `support` prints after RESULT, run as a process on a faked GPU."""
    paths = [str(ROOT / "tests"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", module, gpu, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LEADOUT_PLUGIN": "0",  # until the rows of plain vLLM are resolved
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    _, found, answer = ended.stdout.partition("RESULT ")
    if not found:
        raise RuntimeError(f"{module} on a faked {gpu} failed:\n{ended.stderr[-3000:]}")
    return json.loads(answer)


# In the child process


@dataclass(frozen=True)
class Pair:
    """The files that the flags of a mode name."""

    target: Path
    drafter: Path
    registry: Path
    tuned: Path
    capture: Path

    def settings(self, mode: Mode) -> dict[str, Any]:
        values = {
            "--draft": {"draft": str(self.drafter)},
            "--registry": {"registry": self.registry},
            "--tuned": {"tuned": self.tuned},
            "--capture": {"capture": self.capture},
            "--live": {"live": True},
        }
        settings: dict[str, Any] = {}
        for flag in mode.leadout:
            settings |= values[flag]
        return settings


def write_pair(folder: Path) -> Pair:
    """A target with attention heads of the usual size, a drafter, and what refers to them.

    The numbers that vLLM resolves depend on heads, lengths and devices, not on width or depth.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from leadout.control.tuned_file import Model, write_tuned
    from leadout.models import fingerprint
    from leadout.registry import Registry
    from support.drafters import TINY_DRAFTER, write_random_drafter
    from support.tuned_files import a_tuning
    from support.version_registry import publish

    heads = {"head_dim": 128, "max_position_embeddings": 40_960}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = folder / "target"
    config = Qwen3Config(**heads, **sizes, **layers, tie_word_embeddings=False)
    config.dtype = "bfloat16"
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(target)
    drafts = replace(
        TINY_DRAFTER,
        head_dim=128,
        target_num_layers=4,
        max_positions=40_960,
        block_size=DRAFT_TOKENS + 1,
    )
    drafter = write_random_drafter(folder / "drafter", drafts)
    registry = Registry(folder / "registry")
    manifest = publish(registry, target, folder, seed=1, config=drafts)
    registry.point_to(manifest.version, "the start")
    models = {
        role: Model(name=str(path), fingerprint=fingerprint(path))
        for role, path in (("target", target), ("drafter", drafter))
    }
    tuned = folder / "tuned.json"
    write_tuned(
        a_tuning(
            ACCEPTANCE,
            per_draft=0.002,
            batches=TUNED_BATCHES,
            step_seconds=0.008,
            runner="V2",
            **models,
        ),
        tuned,
    )
    return Pair(target, drafter, registry.folder, tuned, folder / "captured")


def plain_flags(pair: Pair, mode: Mode) -> list[str]:
    """Flags of plain vLLM with the same drafter and the same further flags."""
    if not mode.has_drafter:
        return [*mode.vllm]
    speculation = {
        "method": "dflash",
        "model": str(pair.drafter),
        "num_speculative_tokens": DRAFT_TOKENS,
        **mode.speculation,
    }
    return [*mode.vllm, "--speculative-config", json.dumps(speculation)]


def planned_config(pair: Pair, mode: Mode) -> Any:
    """vLLM's config for the command that `leadout serve` would run."""
    from leadout.engine.serve_plan import make_plan
    from leadout.engine.settings import ServeSettings
    from leadout.engine.vllm_flags import vllm_config_of

    settings, flags = pair.settings(mode), mode.vllm
    if mode.speculation:
        flags = (*flags, "--speculative-config", json.dumps(mode.speculation))
    plan = make_plan(ServeSettings(target=str(pair.target), vllm_flags=flags, **settings))
    at = plan.command.index(str(pair.target))
    return vllm_config_of(str(pair.target), plan.command[at + 1 :])


def in_engine(vllm_config: Any) -> Any:
    """The config as an engine has it: data-parallel ones are independent of each other."""
    from leadout.engine.settings import restore_draft_table

    if vllm_config.parallel_config.data_parallel_size > 1:
        # vLLM does so in each engine, and Leadout in its scheduler and its draft model class.
        vllm_config.parallel_config.reconfigure_for_independent_dp_rank()
        restore_draft_table(vllm_config)
    return vllm_config


def facts_of(vllm_config: Any) -> dict[str, Any]:
    """The fields of a row."""
    from support.gpu_graphs import Graphs

    vllm_config = in_engine(vllm_config)
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    graphs = Graphs(vllm_config)
    return {
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "async_scheduling": scheduler.async_scheduling,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "cudagraph_mode": graphs.mode,
        "capture_sizes": sorted(compilation.cudagraph_capture_sizes or []),
        "full_graphs": graphs.full_graphs(),
        "graph_gaps": graphs.gaps(),
        "graphs": graphs.count(),
        "target_attention": graphs.target_backend,
        "drafter_attention": graphs.drafter_backend,
        "drafter_graphs": graphs.drafter_full_graphs(),
    }


def differences(
    mode: Mode, plain: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The fields that differ, each with its reason; None: there is none."""
    return [
        {"field": name, "plain": plain[name], "leadout": ours[name], "reason": mode.reason(name)}
        for name in plain
        if plain[name] != ours[name]
    ]


def resolve_all(pair: Pair, modes: Sequence[Mode]) -> Iterator[dict[str, Any]]:
    """The rows of plain vLLM, then those of Leadout compared with them."""
    from leadout.engine.plugin import SWITCH, register
    from leadout.engine.vllm_flags import vllm_config_of
    from leadout.errors import LeadoutError

    plain: dict[str, dict[str, Any]] = {}
    for mode in modes:
        name = mode.compared_with
        if name not in plain:
            plain[name] = facts_of(vllm_config_of(str(pair.target), plain_flags(pair, mode)))
            yield {"mode": name, **plain[name]}
    # vLLM loads its plugins once, with the switch off; from here on Leadout's is active.
    del os.environ[SWITCH]
    register()
    for mode in modes:
        name = mode.compared_with
        row: dict[str, Any] = {"mode": mode.name, "compared_with": name}
        try:
            ours = facts_of(planned_config(pair, mode))
        except LeadoutError as problem:
            yield {**row, "refused": _without_folders(str(problem), pair)}
            continue
        yield {**row, **ours, "differs": differences(mode, plain[name], ours)}


def _without_folders(text: str, pair: Pair) -> str:
    return text.replace(f"{pair.target.parent}/", "")


def main() -> None:
    from support.fake_gpu import install

    (gpu,) = sys.argv[1:]
    install(gpu)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(resolve_all(write_pair(Path(folder)), (*MODES, WITH_TABLE)))
    print("RESULT " + json.dumps(rows))


if __name__ == "__main__":
    main()

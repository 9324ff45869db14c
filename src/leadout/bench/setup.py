"""What a bench measures: arms and their servers, prompt sets, cells in their order, and the plan.

An arm is one server; a cell is one prompt set at one concurrency. In each round every cell is
measured once on every arm.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from leadout.bench.settings import BenchError
from leadout.control.cost_model import PiecewiseLinear
from leadout.data.prompts import prompts_hash
from leadout.engine.plugin import SWITCH
from leadout.engine.server import server_command
from leadout.evaluate.prompts import prompts_or_default
from leadout.models import last_part

BARE, FIXED, TUNED, LIVE = "bare", "fixed", "tuned", "live"
MIN_REQUESTS = 3  # of a cell
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # in GiB, read on CPUs only
_SMALL_KV_SPACE = "1"  # vLLM's default is most of the memory, for each of several servers
_GPU_MEMORY = 0.9  # vLLM's own default, here for all servers together
_SECONDS_BETWEEN_CELLS = 1.5  # the generator's tokenizer and the like


class Arm(BaseModel):
    """One server that is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["bare", "fixed", "tuned", "live"]
    drafter: str | None = None
    draft_tokens: int | None = None  # K of a fixed arm
    tuned: str | None = None  # file of a tuned arm; a live arm starts from it

    @property
    def is_bare(self) -> bool:
        return self.name == BARE


class BenchSetup(BaseModel):
    """Everything that is fixed before the first measurement; stored beside the rounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    arms: list[Arm]
    prompts: dict[str, str]  # of each prompt set, the hash of its prompts
    concurrencies: list[int]
    rounds: int
    waves: int  # requests of a cell, as a multiple of its concurrency
    output_tokens: int
    flags: list[str]  # of all servers

    def requests_at(self, concurrency: int) -> int:
        return max(MIN_REQUESTS, self.waves * concurrency)

    def can_continue(self, earlier: BenchSetup) -> bool:
        """Whether rounds of an earlier run count in this one: only their number may differ."""
        return self.model_copy(update={"rounds": earlier.rounds}) == earlier

    def without_folders(self) -> Self:
        """For results: paths of this machine mean nothing elsewhere."""

        def short(name: str | None) -> str | None:
            return None if name is None else last_part(name)

        arms = [
            arm.model_copy(update={"drafter": short(arm.drafter), "tuned": short(arm.tuned)})
            for arm in self.arms
        ]
        return self.model_copy(update={"target": last_part(self.target), "arms": arms})


@dataclass(frozen=True, slots=True)
class PromptSet:
    """First turns, of which every round takes others."""

    name: str
    texts: tuple[str, ...]
    hash: str

    def of_round(self, number: int, count: int) -> list[str]:
        """The prompts of a round, starting where those of the round before ended."""
        return [self.texts[(number * count + i) % len(self.texts)] for i in range(count)]


def read_sets(sources: Sequence[str]) -> list[PromptSet]:
    """One set for each file; without files, the small sets that come with Leadout."""
    prompts = prompts_or_default(sources)
    if not all(prompt.turns for prompt in prompts):
        raise BenchError(
            "--prompts: bench needs prompt texts, not prompts that the target generates itself; "
            "give .jsonl files."
        )
    names = dict.fromkeys(prompt.source for prompt in prompts)
    by_set = {name: [prompt for prompt in prompts if prompt.source == name] for name in names}
    return [
        PromptSet(name, tuple(prompt.turns[0] for prompt in part), prompts_hash(part))
        for name, part in by_set.items()
    ]


def write_prompts(texts: Sequence[str], path: Path) -> Path:
    """In the format of vLLM's load generator."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


class Cell(BaseModel):
    """One load on one server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_set: str
    concurrency: int
    round: int
    arm: str


def all_cells(settings: BenchSetup) -> list[Cell]:
    """In the order of measurement, round by round.

    The arms take turns at every cell, so that a slow minute of the machine affects them alike, and
    another arm starts in each round.
    """
    names = [arm.name for arm in settings.arms]
    return [
        Cell(prompt_set=prompt_set, concurrency=concurrency, round=number, arm=arm)
        for number in range(settings.rounds)
        for prompt_set in settings.prompts
        for concurrency in settings.concurrencies
        for arm in rotated(names, number)
    ]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names, starting with another one."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second by concurrency, and where they come from."""

    tokens_per_second: Mapping[int, float]
    source: str


class BenchPlan(BaseModel):
    model_config = ConfigDict(extra="forbid")

    arms: list[str]
    prompt_sets: list[str]
    concurrencies: list[int]
    rounds: int
    cells: int
    cells_done: int
    output_tokens: int
    minutes: float
    rates: dict[int, float]
    rates_from: str


def make_plan(settings: BenchSetup, done: Sequence[Cell], rates: Rates) -> BenchPlan:
    """What is left to do, and how long it takes if every arm is as fast as `rates`."""
    left = [cell for cell in all_cells(settings) if cell not in set(done)]
    speed = PiecewiseLinear.through(rates.tokens_per_second)
    tokens = [settings.requests_at(cell.concurrency) * settings.output_tokens for cell in left]
    seconds = sum(
        count / speed(cell.concurrency) + _SECONDS_BETWEEN_CELLS
        for count, cell in zip(tokens, left, strict=True)
    )
    return BenchPlan(
        arms=[arm.name for arm in settings.arms],
        prompt_sets=list(settings.prompts),
        concurrencies=settings.concurrencies,
        rounds=settings.rounds,
        cells=len(left),
        cells_done=len(all_cells(settings)) - len(left),
        output_tokens=sum(tokens),
        minutes=seconds / 60,
        rates=dict(rates.tokens_per_second),
        rates_from=rates.source,
    )


def make_arms(
    max_draft_tokens: Mapping[str, int],
    draft_tokens: Sequence[int],
    tuned: str | None,
    tuned_drafter: str | None = None,
    live: bool = False,
) -> list[Arm]:
    """Bare vLLM, then every drafter at every fixed K, then the tuned arm and the live one.

    `max_draft_tokens` has the largest K of each drafter, which is also the default K. With one
    drafter the arms are named `fixed` and `fixed-K`, with several after the drafters. The tuned arm
    uses `tuned_drafter` if the tuned file belongs to one of these drafters, else the one that the
    file names; the live arm starts from the same file, or without a file from the only drafter.
    """
    arms = [Arm(name=BARE, kind="bare")]
    for drafter, max_k in max_draft_tokens.items():
        for k in dict.fromkeys(draft_tokens or [max_k]):
            if not 1 <= k <= max_k:
                raise BenchError(
                    f"--draft-tokens {k}: {drafter} drafts 1 to {max_k} tokens per step; omit the "
                    "flag to use its maximum."
                )
            base = FIXED if len(max_draft_tokens) == 1 else last_part(drafter)
            name = _unused(base if k == max_k else f"{base}-{k}", arms)
            arms.append(Arm(name=name, kind="fixed", drafter=drafter, draft_tokens=k))
    if tuned is not None:
        name = _unused(TUNED, arms)
        arms.append(Arm(name=name, kind="tuned", drafter=tuned_drafter, tuned=tuned))
    if live:
        if tuned is None and len(max_draft_tokens) != 1:
            raise BenchError(
                "--live requires either a --tuned file or exactly one --draft, got "
                f"{len(max_draft_tokens)} drafters and no file."
            )
        start = tuned_drafter if tuned is not None else next(iter(max_draft_tokens))
        arms.append(Arm(name=_unused(LIVE, arms), kind="live", drafter=start, tuned=tuned))
    return arms


def _unused(name: str, arms: Sequence[Arm]) -> str:
    taken = {arm.name for arm in arms}
    names = [name, *(f"{name}-again-{number}" for number in range(2, len(arms) + 2))]
    return next(each for each in names if each not in taken)


def common_flags(concurrencies: Sequence[int], arms: int, on_cpu: bool) -> list[str]:
    """Flags that make servers comparable; the user's come later and take precedence."""
    flags = ["--max-num-seqs", str(max(concurrencies))]
    # Prompts repeat between rounds: with a prefix cache the time to first token would be wrong.
    flags.append("--no-enable-prefix-caching")
    if on_cpu:
        # Compilation takes minutes on CPUs, and vLLM's own kernels are faster.
        return [*flags, "--enforce-eager", "--compilation-config", '{"custom_ops": ["all"]}']
    # All servers run at the same time, on the same accelerators.
    return [*flags, "--gpu-memory-utilization", f"{_GPU_MEMORY / arms:.2f}"]


@dataclass(frozen=True, slots=True)
class Launch:
    command: list[str]
    environment: dict[str, str]


def arm_command(arm: Arm, target: str, flags: Sequence[str]) -> Launch:
    """How an arm's server is started; bare and fixed arms are plain vLLM without our plugin."""
    environment = {KV_SPACE: os.environ.get(KV_SPACE, _SMALL_KV_SPACE)}
    if arm.kind in ("tuned", "live"):
        serve = [sys.executable, "-m", "leadout", "serve", target]
        draft = [] if arm.drafter is None else ["--draft", arm.drafter]
        tuned = [] if arm.tuned is None else ["--tuned", arm.tuned]
        live = ["--live"] if arm.kind == "live" else []
        return Launch([*serve, *draft, *tuned, *live, *flags], environment)
    own = [] if arm.is_bare else ["--speculative-config", _speculation(arm)]
    return Launch(server_command(target, [*flags, *own]), {**environment, SWITCH: "0"})


def _speculation(arm: Arm) -> str:
    return json.dumps(
        {"method": "dflash", "model": arm.drafter, "num_speculative_tokens": arm.draft_tokens}
    )

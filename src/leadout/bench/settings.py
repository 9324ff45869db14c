"""What a bench measures, and how: kept beside the rounds, so that only the same one goes on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict

from leadout.control.cost_model import PiecewiseLinear
from leadout.data.prompts import prompts_hash
from leadout.engine.plugin import SWITCH
from leadout.engine.server import server_command
from leadout.errors import LeadoutError
from leadout.evaluate.prompts import prompts_or_default
from leadout.files import replacing
from leadout.models import last_part

BARE = "bare"
FEWEST_REQUESTS = 3  # of a cell


class BenchError(LeadoutError):
    """The bench cannot be made as asked."""


class Arm(BaseModel):
    """One server that is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["bare", "fixed", "tuned", "live"]
    drafter: str | None = None
    draft_tokens: int | None = None  # K of a fixed arm
    tuned: str | None = None  # the file of a tuned arm; a live one starts from it

    @property
    def is_bare(self) -> bool:
        return self.name == BARE


class BenchSettings(BaseModel):
    """One cell is a prompt set at a concurrency; each round measures it once on every arm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    arms: list[Arm]
    prompts: dict[str, str]  # of each prompt set, the hash of its prompts
    concurrencies: list[int]
    rounds: int
    waves: int  # requests of a cell for each place in its concurrency
    output_tokens: int
    flags: list[str]  # of all servers

    def requests_at(self, concurrency: int) -> int:
        return max(FEWEST_REQUESTS, self.waves * concurrency)

    def goes_on_from(self, earlier: BenchSettings) -> bool:
        """Whether rounds of an earlier run count in this one: only their number may differ."""
        return self.model_copy(update={"rounds": earlier.rounds}) == earlier

    def without_folders(self) -> Self:
        """Folders of this machine mean nothing elsewhere."""

        def short(name: str | None) -> str | None:
            return None if name is None else last_part(name)

        arms = [
            arm.model_copy(update={"drafter": short(arm.drafter), "tuned": short(arm.tuned)})
            for arm in self.arms
        ]
        return self.model_copy(update={"target": last_part(self.target), "arms": arms})

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


# What a bench is asked to do, and whom it tells how far it is.


@dataclass(frozen=True, slots=True)
class BenchRequest:
    target: str
    drafts: tuple[str, ...]
    draft_tokens: tuple[int, ...]  # K of fixed arms; none: all that a drafter's block allows
    tuned: Path | None
    live: bool
    prompts: tuple[str, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    waves: int
    output_tokens: int
    flags: tuple[str, ...]  # of all servers
    out: Path
    resume: bool


class Progress(Protocol):
    def say(self, text: str) -> None:
        """What happens now."""

    def cells(self, total: int, done: int) -> None:
        """The cells begin, of which so many are done already."""

    def advance(self) -> None:
        """One more cell is done."""


# The prompts of a bench: sets of first turns, of which every round takes others.


@dataclass(frozen=True, slots=True)
class PromptSet:
    name: str
    texts: tuple[str, ...]
    hash: str

    def of_round(self, number: int, count: int) -> list[str]:
        """The prompts of a round, which begin where those of the round before ended."""
        return [self.texts[(number * count + i) % len(self.texts)] for i in range(count)]


def read_sets(sources: Sequence[str]) -> list[PromptSet]:
    """One set for each file; without a file, the small sets that come with Leadout."""
    prompts = prompts_or_default(sources)
    if not all(prompt.turns for prompt in prompts):
        raise BenchError(
            "--prompts: found prompts that the target writes itself, wanted texts; give files"
        )
    names = dict.fromkeys(prompt.source for prompt in prompts)
    by_set = {name: [prompt for prompt in prompts if prompt.source == name] for name in names}
    return [
        PromptSet(name, tuple(prompt.turns[0] for prompt in part), prompts_hash(part))
        for name, part in by_set.items()
    ]


def write_prompts(texts: Sequence[str], path: Path) -> Path:
    """As vLLM's load generator reads them."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


# The cells of a bench in the order in which they are measured, and how long they will take.

_SECONDS_BETWEEN = 1.5  # the generator's tokenizer and the like, at every cell


class Cell(BaseModel):
    """One load on one server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_set: str
    concurrency: int
    round: int
    arm: str


def all_cells(settings: BenchSettings) -> list[Cell]:
    """Round after round; in a round the arms take turns at every cell, so noise hits them alike.

    Another arm begins in every round.
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
    """The same names, another one first."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second by concurrency, and where they were taken from."""

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


def make_plan(settings: BenchSettings, done: Sequence[Cell], rates: Rates) -> BenchPlan:
    """What is left to do and how long that takes, if every arm is as fast as the rates."""
    left = [cell for cell in all_cells(settings) if cell not in set(done)]
    speed = PiecewiseLinear.through(rates.tokens_per_second)
    tokens = [settings.requests_at(cell.concurrency) * settings.output_tokens for cell in left]
    seconds = sum(
        count / speed(cell.concurrency) + _SECONDS_BETWEEN
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


# The arms of a bench: which there are, and the command and environment of each one's server.

FIXED, TUNED, LIVE = "fixed", "tuned", "live"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # in GiB, read on CPUs only
_SMALL_KV_SPACE = "1"  # vLLM's own guess is most of the memory, for each of several servers
_GPU_MEMORY = 0.9  # vLLM's own default, here for all servers together


def make_arms(
    most_tokens: Mapping[str, int],
    draft_tokens: Sequence[int],
    tuned: str | None,
    tuned_drafter: str | None = None,
    live: bool = False,
) -> list[Arm]:
    """Bare vLLM, then every drafter at every fixed K, then the tuned arm and the live one.

    `most_tokens` holds the largest K of each drafter, which is also the K where none is asked for.
    With one drafter the arms are called `fixed` and `fixed-K`, with several after the drafters. The
    tuned arm drafts with `tuned_drafter`, if the tuned file is of one of these, else with its own;
    the live arm starts from the same file, or with the only drafter and no file.
    """
    arms = [Arm(name=BARE, kind="bare")]
    for drafter, most in most_tokens.items():
        for k in dict.fromkeys(draft_tokens or [most]):
            if not 1 <= k <= most:
                raise BenchError(
                    f"--draft-tokens: found {k}, wanted 1 to {most}, which is what a block of "
                    f"{drafter} holds; leave the flag out for the most"
                )
            base = FIXED if len(most_tokens) == 1 else last_part(drafter)
            name = _unused(base if k == most else f"{base}-{k}", arms)
            arms.append(Arm(name=name, kind="fixed", drafter=drafter, draft_tokens=k))
    if tuned is not None:
        name = _unused(TUNED, arms)
        arms.append(Arm(name=name, kind="tuned", drafter=tuned_drafter, tuned=tuned))
    if live:
        if tuned is None and len(most_tokens) != 1:
            raise BenchError(
                f"--live: found {len(most_tokens)} drafters and no --tuned file, wanted one drafter"
                " or a file that names it; give one --draft, or --tuned"
            )
        of_live = tuned_drafter if tuned is not None else next(iter(most_tokens))
        arms.append(Arm(name=_unused(LIVE, arms), kind="live", drafter=of_live, tuned=tuned))
    return arms


def _unused(name: str, arms: Sequence[Arm]) -> str:
    taken = {arm.name for arm in arms}
    names = [name, *(f"{name}-again-{number}" for number in range(2, len(arms) + 2))]
    return next(each for each in names if each not in taken)


def common_flags(concurrencies: Sequence[int], arms: int, on_cpu: bool) -> list[str]:
    """What makes servers comparable; flags that the user gives come later and win."""
    flags = ["--max-num-seqs", str(max(concurrencies))]
    # The same prompts come again in every round: a cache of them would make the time to the first
    # token a lie.
    flags.append("--no-enable-prefix-caching")
    if on_cpu:
        # Compilation takes minutes there, and vLLM's own kernels serve better.
        return [*flags, "--enforce-eager", "--compilation-config", '{"custom_ops": ["all"]}']
    # All servers stay up together, on the same accelerators.
    return [*flags, "--gpu-memory-utilization", f"{_GPU_MEMORY / arms:.2f}"]


@dataclass(frozen=True, slots=True)
class Launch:
    command: list[str]
    environment: dict[str, str]


def arm_command(arm: Arm, target: str, flags: Sequence[str]) -> Launch:
    """How an arm's server is started. Bare and fixed ones are vLLM as it is, without our plugin."""
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

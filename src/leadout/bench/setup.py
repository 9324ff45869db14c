"""What a bench measures: arms and their servers, prompt sets, cells in their order, and the plan.

An arm is one server; a cell is one prompt set at one concurrency. In each round every cell is
measured once on every arm, with prompts in a random order that goes on from round to round. Bare
vLLM is always two arms, `bare` and `bare-again`: the ratio of the two is the error of the method.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from leadout.bench.settings import BenchError
from leadout.data.prompts import prompts_hash
from leadout.engine.plugin import SWITCH
from leadout.engine.server import server_command
from leadout.engine.server_turns import Launch, Turns, machine_environment, machine_flags
from leadout.evaluate.prompts import prompts_or_default
from leadout.models import last_part
from leadout.provenance import redacted

BARE, BARE_AGAIN, FIXED, TUNED, LIVE = "bare", "bare-again", "fixed", "tuned", "live"
ADAPTIVE = {"enable_adaptive_verification": True}  # in vLLM's speculative_config
_SECONDS_BETWEEN_ROUNDS = 0.5  # counters, and the first prefills of a load


class Arm(BaseModel):
    """One server that is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["bare", "fixed", "tuned", "live"]
    drafter: str | None = None
    draft_tokens: int | None = None  # K of a fixed arm
    tuned: str | None = None  # file of a tuned arm; a live arm starts from it
    leadout_class: bool = False  # of a fixed arm: Leadout's draft class instead of vLLM's
    adaptive_verification: bool = False  # of a fixed arm: vLLM's, on GPUs

    @property
    def is_bare(self) -> bool:
        return self.kind == BARE


class BenchSetup(BaseModel):
    """Everything that is fixed before the first measurement; stored beside the rounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    arms: list[Arm]
    prompts: dict[str, str]  # of each prompt set, the hash of its prompts
    concurrencies: list[int]
    rounds: int
    turns: Turns
    seconds: float  # that each arm runs in a round of a cell
    output_tokens: int
    stop_at_end_of_text: bool = False
    flags: list[str]  # of all servers

    def can_continue(self, earlier: BenchSetup) -> bool:
        """Whether rounds of an earlier run count in this one: only their number may differ."""
        return self.model_copy(update={"rounds": earlier.rounds}) == earlier

    def without_folders(self) -> Self:
        """For results: paths of this machine mean nothing elsewhere, and keys stay here."""

        def short(name: str | None) -> str | None:
            return None if name is None else last_part(name)

        arms = [
            arm.model_copy(update={"drafter": short(arm.drafter), "tuned": short(arm.tuned)})
            for arm in self.arms
        ]
        shown = {"target": last_part(self.target), "arms": arms, "flags": redacted(self.flags)}
        return self.model_copy(update=shown)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The first turns of a file's prompts."""

    name: str
    texts: tuple[str, ...]
    hash: str

    def in_random_order(self, concurrency: int, start: int) -> tuple[str, ...]:
        """The same for all arms; another order for every load, whose first round is `start`.

        Rounds see other prompts, so that resampling rounds resamples prompts too.
        """
        order = random.Random(f"{self.hash} {concurrency} {start}")
        return tuple(order.sample(self.texts, len(self.texts)))


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
    _require_disjoint({name: {p.text for p in part} for name, part in by_set.items()})
    return [
        PromptSet(name, tuple(prompt.text for prompt in part), prompts_hash(part))
        for name, part in by_set.items()
    ]


def _require_disjoint(by_set: Mapping[str, set[str]]) -> None:
    """The same prompt in two sets would count twice in the mean over sets."""
    for (one, texts), (other, others) in combinations(by_set.items(), 2):
        if shared := len(texts & others):
            raise BenchError(
                f"--prompts: {one} and {other} share {shared} prompts, expected sets without "
                "common prompts; leave one of them out or remove the shared prompts from it."
            )


class Cell(BaseModel):
    """One load on one server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_set: str
    concurrency: int
    round: int
    arm: str

    @property
    def pair(self) -> tuple[str, int, int]:
        """What all arms have in common that are compared with each other."""
        return self.prompt_set, self.concurrency, self.round


def all_cells(setup: BenchSetup) -> list[Cell]:
    """Prompt set by prompt set, in ascending concurrency."""
    return [
        Cell(prompt_set=prompt_set, concurrency=concurrency, round=number, arm=arm.name)
        for prompt_set in setup.prompts
        for concurrency in setup.concurrencies
        for number in range(setup.rounds)
        for arm in setup.arms
    ]


class BenchPlan(BaseModel):
    model_config = ConfigDict(extra="forbid")

    arms: list[str]
    prompt_sets: list[str]
    concurrencies: list[int]
    rounds: int
    turns: Turns
    cells: int
    cells_done: int
    seconds: float
    minutes: float  # without starting servers
    server_starts: int


def make_plan(setup: BenchSetup, done: Sequence[Cell]) -> BenchPlan:
    """What is left to measure, and how long that takes."""
    cells = all_cells(setup)
    left = set(cells) - set(done)
    return BenchPlan(
        arms=[arm.name for arm in setup.arms],
        prompt_sets=list(setup.prompts),
        concurrencies=setup.concurrencies,
        rounds=setup.rounds,
        turns=setup.turns,
        cells=len(left),
        cells_done=len(cells) - len(left),
        seconds=setup.seconds,
        minutes=len(left) * (setup.seconds + _SECONDS_BETWEEN_ROUNDS) / 60,
        server_starts=_starts(setup, left),
    )


def _starts(setup: BenchSetup, left: set[Cell]) -> int:
    """Servers that are started: all at once, or every one of them in every round."""
    if setup.turns == "single":
        return len({(cell.round, cell.arm) for cell in left})
    return len(setup.arms) if left else 0


def make_arms(
    max_draft_tokens: Mapping[str, int],
    draft_tokens: Sequence[int],
    tuned: str | None,
    tuned_drafter: str | None = None,
    live: bool = False,
    leadout_class: bool = False,
    adaptive_verification: bool = False,
) -> list[Arm]:
    """Bare vLLM twice, then every drafter at every fixed K, then the tuned arm and the live one.

    `max_draft_tokens` has the largest K of each drafter, which is also the default K. With one
    drafter the arms are named `fixed` and `fixed-K`, with several after the drafters; with
    `leadout_class` each is followed by one with Leadout's draft class, and with
    `adaptive_verification` each of them by one with vLLM's own. The tuned arm
    uses `tuned_drafter` if the tuned file belongs to one of these drafters, else the one that the
    file names; the live arm starts from the same file, or without a file from the only drafter.
    """
    arms = [Arm(name=BARE, kind="bare"), Arm(name=BARE_AGAIN, kind="bare")]
    for drafter, max_k in max_draft_tokens.items():
        for k in dict.fromkeys(draft_tokens or [max_k]):
            if not 1 <= k <= max_k:
                raise BenchError(
                    f"--draft-tokens {k}: {drafter} drafts 1 to {max_k} tokens per step; omit the "
                    "flag to use its maximum."
                )
            base = FIXED if len(max_draft_tokens) == 1 else last_part(drafter)
            name = _unused(base if k == max_k else f"{base}-{k}", arms)
            fixed = Arm(name=name, kind="fixed", drafter=drafter, draft_tokens=k)
            arms.append(fixed)
            if leadout_class:
                ours = {"name": _unused(f"{name}-leadout", arms), "leadout_class": True}
                arms.append(fixed.model_copy(update=ours))
            if adaptive_verification:
                adaptive = {
                    "name": _unused(f"{name}-adaptive", arms),
                    "adaptive_verification": True,
                }
                arms.append(fixed.model_copy(update=adaptive))
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


def common_flags(concurrencies: Sequence[int], on_cpu: bool, servers: int) -> list[str]:
    """Flags that make servers comparable; the user's come later and take precedence.

    `servers` is the number of servers that are up at the same time.
    """
    flags = ["--max-num-seqs", str(max(concurrencies))]
    # Prompts repeat between rounds: with a prefix cache they would not be computed again.
    flags.append("--no-enable-prefix-caching")
    return [*flags, *machine_flags(on_cpu, servers)]


def arm_command(arm: Arm, target: str, flags: Sequence[str]) -> Launch:
    """How an arm's server is started; bare and fixed arms are plain vLLM, without our plugin unless
    the arm is there to measure Leadout's draft class."""
    environment = machine_environment()
    if arm.kind in ("tuned", "live"):
        serve = [sys.executable, "-m", "leadout", "serve", target]
        draft = [] if arm.drafter is None else ["--draft", arm.drafter]
        tuned = [] if arm.tuned is None else ["--tuned", arm.tuned]
        live = ["--live"] if arm.kind == "live" else []
        return Launch(arm.name, [*serve, *draft, *tuned, *live, *flags], environment)
    own = [] if arm.is_bare else ["--speculative-config", _speculation(arm)]
    switch = {} if arm.leadout_class else {SWITCH: "0"}
    command = server_command(target, [*flags, *own])
    return Launch(arm.name, command, {**environment, **switch})


def _speculation(arm: Arm) -> str:
    found = {"method": "dflash", "model": arm.drafter, "num_speculative_tokens": arm.draft_tokens}
    return json.dumps({**found, **ADAPTIVE} if arm.adaptive_verification else found)

"""Synthetic traffic and machines to try the draft-length policy on.

An acceptance process gives the acceptance probability of each draft position for one slot of the
batch at one moment. Time is counted in bare steps of the simulated engine, so that traffic changes
by the clock and not by what the policy does. A slot serves one request after another; each is of a
kind drawn at random, the same in every run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from leadout.control.cost_model import StepCosts

Probabilities = tuple[float, ...]  # by draft position, given that all before were accepted
MAX_DRAFTS = 7
LIFETIME = 250  # bare steps that a request stays


@dataclass(frozen=True, slots=True)
class Moment:
    """Clock and slot; `idle` and `streak` are for adversaries that react to the policy."""

    clock: float
    slot: int
    idle: int = 0  # steps since the slot last verified a draft
    streak: int = 0  # consecutive steps in which it verified some


AcceptanceProcess = Callable[[Moment], Probabilities]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic. `load`: the share of occupied slots, by the clock."""

    name: str
    acceptance: AcceptanceProcess
    load: Callable[[float], float] = lambda clock: 1.0
    is_adversary: bool = False  # acceptance depends on what the policy does
    lifetime: int = LIFETIME
    prompt_tokens: float = 0.0  # for each generated one: requests that end make room for others
    slowdown: Callable[[float], float] = lambda clock: 1.0  # factor of all seconds, by the clock

    def prefill_for(self, generated: float) -> int:
        """Tokens of prompts in a step that generates so many."""
        return round(self.prompt_tokens * generated)

    def request(self, clock: float, slot: int) -> str:
        return f"{slot}-{_request_number(clock, slot, self.lifetime)}"


def level(first: float, decay: float = 0.97) -> Probabilities:
    """The probability of the first draft, a little lower for each one after it."""
    return tuple(first * decay**position for position in range(MAX_DRAFTS))


CODE, CHAT, TRANSLATION = level(0.88), level(0.6), level(0.08)


def _request_number(clock: float, slot: int, lifetime: int) -> int:
    """Requests come and go at different moments in different slots."""
    return int(clock + slot * lifetime * 0.38) // lifetime


@lru_cache(maxsize=65536)
def _uniform(slot: int, number: int, name: str) -> float:
    return random.Random(f"{name}/{slot}/{number}").random()


def steady(probabilities: Probabilities) -> AcceptanceProcess:
    return lambda moment: probabilities


def _mixture(
    name: str, kinds: Sequence[tuple[float, Probabilities]], lifetime: int = LIFETIME
) -> AcceptanceProcess:
    """Each request is of one kind, drawn by weight."""

    def acceptance(moment: Moment) -> Probabilities:
        number = _request_number(moment.clock, moment.slot, lifetime)
        drawn = _uniform(moment.slot, number, name)
        for weight, probabilities in kinds:
            if drawn < weight:
                return probabilities
            drawn -= weight
        return kinds[-1][1]

    return acceptance


def _switching(every: float, phases: Sequence[Probabilities]) -> AcceptanceProcess:
    """All traffic changes at once."""
    return lambda moment: phases[int(moment.clock / every) % len(phases)]


def _drift(low: float, high: float, period: float) -> AcceptanceProcess:
    steps = 64
    table = [
        level(low + (high - low) * (0.5 + 0.5 * math.cos(2 * math.pi * step / steps)))
        for step in range(steps)
    ]
    return lambda moment: table[int(moment.clock / period * steps) % steps]


def _ramp(start: float, end: float, duration: float) -> AcceptanceProcess:
    table = [level(start + (end - start) * step / 64) for step in range(65)]
    return lambda moment: table[min(int(64 * moment.clock / duration), 64)]


def _switching_requests(every: float, phases: Sequence[Probabilities]) -> AcceptanceProcess:
    """Each request changes on its own, such as from prose to code."""

    def acceptance(moment: Moment) -> Probabilities:
        offset = _uniform(moment.slot, 0, "within") * every * len(phases)
        return phases[int((moment.clock + offset) / every) % len(phases)]

    return acceptance


def _all_or_nothing(share: float) -> Probabilities:
    """A share of the drafts is accepted whole, the others fail at the first position."""
    return (share, *([0.98] * (MAX_DRAFTS - 1)))


def _bursts(clock: float) -> float:
    """A quarter of the slots, and all of them for 50 out of 200 steps."""
    return 1.0 if clock % 200 < 50 else 0.25


def _honeypot(moment: Moment) -> Probabilities:
    """Drafts are accepted for two steps after ten idle ones: probes succeed, drafting does not."""
    return CODE if moment.idle >= 10 or 0 < moment.streak < 2 else TRANSLATION


def _shy(moment: Moment) -> Probabilities:
    """Drafts fail unless the two steps before had drafts too: single probes are misled."""
    return CODE if moment.streak >= 2 else TRANSLATION


# Names are keys of results/control/simulator.json.
def _tuning_traffic() -> list[Traffic]:
    processes: dict[str, AcceptanceProcess] = {
        "steady, hopeless": steady(level(0.02)),
        "steady 0.2": steady(level(0.2)),
        "steady 0.4": steady(level(0.4)),
        "steady 0.6": steady(level(0.6)),
        "steady 0.8": steady(level(0.8)),
        "steady 0.95": steady(level(0.95)),
        "collapse after 2": steady((0.9, 0.85, 0.05, 0.05, 0.05, 0.05, 0.05)),
        "collapse after 4": steady((0.9, 0.9, 0.85, 0.85, 0.05, 0.05, 0.05)),
        "weak first, strong rest": steady((0.35, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9)),
        "all or nothing 0.3": steady(_all_or_nothing(0.3)),
        "all or nothing 0.7": steady(_all_or_nothing(0.7)),
        "slow drift": _drift(0.1, 0.9, 2000),
        "fast drift": _drift(0.2, 0.9, 500),
        "ageing drafter": _ramp(0.85, 0.3, 2000),
        "improving drafter": _ramp(0.05, 0.8, 2000),
        "two kinds, half each": _mixture("half", [(0.5, CODE), (0.5, TRANSLATION)]),
        "two kinds, one in eight good": _mixture("eighth", [(0.125, CODE), (0.875, TRANSLATION)]),
        "three kinds": _mixture("three", [(0.3, CODE), (0.4, CHAT), (0.3, TRANSLATION)]),
        "switch every 500": _switching(500, [CODE, TRANSLATION]),
        "switch every 300": _switching(300, [CODE, TRANSLATION]),
        "switch of three": _switching(400, [TRANSLATION, CHAT, CODE]),
        "requests that switch": _switching_requests(150, [CHAT, CODE]),
    }
    found = [Traffic(name, acceptance) for name, acceptance in processes.items()]
    found.append(Traffic("bursts of code", steady(CODE), load=_bursts))
    found.append(Traffic("bursts of chat", steady(CHAT), load=_bursts))
    short = _mixture("short", [(0.5, CODE), (0.5, CHAT)], lifetime=40)
    found.append(Traffic("short requests of two kinds", short, lifetime=40))
    found.append(Traffic("prefill in every step", steady(CHAT), prompt_tokens=2.0))
    slow = Traffic("half speed from 300 on", steady(CHAT), slowdown=lambda clock: 1 + (clock > 300))
    found.append(slow)
    found.append(Traffic("adversary: honeypot", _honeypot, is_adversary=True))
    found.append(Traffic("adversary: shy", _shy, is_adversary=True))
    return found


def _held_out_traffic() -> list[Traffic]:
    processes: dict[str, AcceptanceProcess] = {
        "steady 0.1": steady(level(0.1)),
        "steady 0.3": steady(level(0.3)),
        "steady 0.5": steady(level(0.5, decay=0.9)),
        "steady 0.7": steady(level(0.7, decay=0.94)),
        "steady 0.9": steady(level(0.9, decay=0.99)),
        "collapse after 1": steady((0.85, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)),
        "collapse after 3": steady((0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1)),
        "all or nothing 0.5": steady(_all_or_nothing(0.5)),
        "drift of 800": _drift(0.15, 0.85, 800),
        "two kinds, 7 in 10 good": _mixture("seven", [(0.7, level(0.8)), (0.3, level(0.15))]),
        "switch every 230": _switching(230, [level(0.75), level(0.12)]),
        "switch every 410": _switching(410, [level(0.05), level(0.9), level(0.45)]),
        "requests that switch to translation": _switching_requests(200, [CODE, TRANSLATION]),
    }
    found = [Traffic(name, acceptance) for name, acceptance in processes.items()]
    short = _mixture("short, three", [(0.4, CODE), (0.3, CHAT), (0.3, TRANSLATION)], lifetime=90)
    found.append(Traffic("short requests of three kinds", short, lifetime=90))
    return found


# The policy's constants were chosen on the first; the others had no part in that.
TUNING_TRAFFIC: tuple[Traffic, ...] = tuple(_tuning_traffic())
HELD_OUT_TRAFFIC: tuple[Traffic, ...] = tuple(_held_out_traffic())


def recorded(name: str, accepted: Sequence[Sequence[int]], window: int = 25) -> Traffic:
    """Recorded traffic: for each request the accepted counts of its steps, all drafts verified.

    The probabilities at a step are those of the steps around it; a slot replays one request after
    another.
    """
    if not accepted or not all(accepted):
        raise ValueError(f"recording {name}: every request needs at least one step")
    processes = [_smoothed(counts, window) for counts in accepted]

    def acceptance(moment: Moment) -> Probabilities:
        number = _request_number(moment.clock, moment.slot, LIFETIME)
        steps = processes[int(_uniform(moment.slot, number, name) * len(processes))]
        return steps[int(moment.clock) % len(steps)]

    return Traffic(name, acceptance)


def _smoothed(counts: Sequence[int], window: int) -> list[Probabilities]:
    found = []
    for step in range(len(counts)):
        near = counts[max(0, step - window) : step + window + 1]
        probabilities = []
        for position in range(MAX_DRAFTS):
            trials = sum(count >= position for count in near)
            accepted = sum(count > position for count in near)
            probabilities.append((accepted + 0.5) / (trials + 1.0))
        found.append(tuple(probabilities))
    return found


BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
Seconds = Callable[[int, int], float]  # of a batch size and the drafts of each request


@dataclass(frozen=True, slots=True)
class MachineModel:
    """What steps cost on a machine.

    `mixed_penalty`: what a step costs more, in bare steps, if requests verify different numbers of
    drafts, or numbers that are not on the ladder.
    """

    costs: Callable[[], StepCosts]
    prefill_token: float  # seconds
    ladder: tuple[int, ...] = tuple(range(MAX_DRAFTS + 1))
    mixed_penalty: float = 0.0

    @property
    def has_graphs(self) -> bool:
        return self.mixed_penalty > 0

    def prefill_seconds(self, tokens: int) -> float:
        return self.prefill_token * tokens


def cpu() -> StepCosts:
    """Like a 135M target on two cores: 36.5 ms bare, and every verified token counts."""

    def verify(batch_size: int, drafts: int) -> float:
        beyond = max(0, batch_size * (1 + drafts) - 8)
        return 1e-3 * (35.8 + 0.73 * batch_size + 0.35 * batch_size * drafts + 0.12 * beyond)

    def draft(batch_size: int, k: int) -> float:
        return 1e-3 * (0.8 + (5.5 + 0.36 * batch_size * k if k else 0.0))

    return _tabulate(verify, draft)


def gpu() -> StepCosts:
    """Memory-bound up to 256 tokens in a pass; drafting costs a tenth of a step."""

    def verify(batch_size: int, drafts: int) -> float:
        tokens = batch_size * (1 + drafts)
        return 1e-3 * (8.0 + 0.01 * batch_size + 0.001 * tokens + 0.025 * max(0, tokens - 256))

    def draft(batch_size: int, k: int) -> float:
        return 1e-3 * (0.05 + (0.8 + 0.001 * batch_size * k if k else 0.0))

    return _tabulate(verify, draft)


def graphs() -> StepCosts:
    """A GPU that replays captured graphs; some lengths are faster than shorter ones.

    The whole block is drafted at any K, as vLLM's V2 runner does.
    """

    def verify(batch_size: int, drafts: int) -> float:
        tokens = batch_size * (1 + drafts)
        padding = 0.0 if drafts in (0, 1, 3, 7) else 1.2  # no kernel for lengths between these
        return 1e-3 * (8.0 + padding + 0.01 * batch_size + 0.03 * max(0, tokens - 64))

    def draft(batch_size: int, k: int) -> float:
        return 1e-3 * (0.05 + (0.9 + 0.004 * batch_size if k else 0.0))

    return _tabulate(verify, draft)


def _tabulate(verify: Seconds, draft: Seconds) -> StepCosts:
    counts = range(MAX_DRAFTS + 1)
    return StepCosts(
        verify={size: {drafts: verify(size, drafts) for drafts in counts} for size in BATCH_SIZES},
        draft={size: {k: draft(size, k) for k in counts} for size in BATCH_SIZES},
    )


MACHINES: dict[str, MachineModel] = {
    "cpu": MachineModel(cpu, prefill_token=0.5e-3),
    "gpu": MachineModel(gpu, prefill_token=4e-6),
    "graphs": MachineModel(
        graphs, prefill_token=4e-6, ladder=(0, 1, 2, 3, 5, 7), mixed_penalty=0.3
    ),
}

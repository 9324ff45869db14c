"""Made-up traffic: laws by which drafts stand, to try the policy on.

A law gives the odds of each draft position for one seat of the batch at one moment. Time runs in
bare steps of the engine at hand, so that traffic changes by the clock and not by what the policy
does. A seat serves one request after another; each is of a kind drawn anew, the same in every run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from leadout.control.cost_model import StepCosts

Odds = tuple[float, ...]
MOST = 7
LIFE = 250  # bare steps that a request stays


@dataclass(frozen=True, slots=True)
class Moment:
    """When and where a law is asked; `idle` and `streak` are for laws that watch the policy."""

    clock: float
    seat: int
    idle: int = 0  # steps since the seat last verified a draft
    streak: int = 0  # steps in a row in which it verified some


@dataclass(frozen=True, slots=True)
class Process:
    """One kind of traffic. `load`: the share of the seats that are taken, by the clock."""

    name: str
    law: Callable[[Moment], Odds]
    load: Callable[[float], float] = lambda clock: 1.0
    watches: bool = False  # the law depends on what the policy does
    life: int = LIFE

    def request(self, clock: float, seat: int) -> str:
        return f"{seat}-{_number(clock, seat, self.life)}"


def level(odds: float, fall: float = 0.97) -> Odds:
    """Odds of the first draft, a little lower for each one after it."""
    return tuple(odds * fall**position for position in range(MOST))


CODE, CHAT, TRANSLATION = level(0.88), level(0.6), level(0.08)


def _number(clock: float, seat: int, life: int) -> int:
    """Requests come and go at different moments in different seats."""
    return int(clock + seat * life * 0.38) // life


@lru_cache(maxsize=65536)
def _drawn(seat: int, number: int, name: str) -> float:
    return random.Random(f"{name}/{seat}/{number}").random()


def steady(odds: Odds) -> Callable[[Moment], Odds]:
    return lambda moment: odds


def _kinds(
    name: str, kinds: Sequence[tuple[float, Odds]], life: int = LIFE
) -> Callable[[Moment], Odds]:
    """Each request is of one kind, drawn by weight."""

    def law(moment: Moment) -> Odds:
        drawn = _drawn(moment.seat, _number(moment.clock, moment.seat, life), name)
        for weight, odds in kinds:
            if drawn < weight:
                return odds
            drawn -= weight
        return kinds[-1][1]

    return law


def _turns(every: float, phases: Sequence[Odds]) -> Callable[[Moment], Odds]:
    """All traffic changes at once."""
    return lambda moment: phases[int(moment.clock / every) % len(phases)]


def _drift(low: float, high: float, period: float) -> Callable[[Moment], Odds]:
    steps = 64
    table = [
        level(low + (high - low) * (0.5 + 0.5 * math.cos(2 * math.pi * step / steps)))
        for step in range(steps)
    ]
    return lambda moment: table[int(moment.clock / period * steps) % steps]


def _ageing(start: float, end: float, over: float) -> Callable[[Moment], Odds]:
    table = [level(start + (end - start) * step / 64) for step in range(65)]
    return lambda moment: table[min(int(64 * moment.clock / over), 64)]


def _within(every: float, phases: Sequence[Odds]) -> Callable[[Moment], Odds]:
    """Each request changes on its own, such as from prose to code."""

    def law(moment: Moment) -> Odds:
        offset = _drawn(moment.seat, 0, "within") * every * len(phases)
        return phases[int((moment.clock + offset) / every) % len(phases)]

    return law


def _all_or_nothing(share: float) -> Odds:
    """A share of the drafts stands whole, the others fall at once: telling by the first draft."""
    return (share, *([0.98] * (MOST - 1)))


def _bursts(clock: float) -> float:
    """A quarter of the seats, and all of them every 200 steps for 50."""
    return 1.0 if clock % 200 < 50 else 0.25


def _honeypot(moment: Moment) -> Odds:
    """Drafts stand for two steps after a rest of ten: probes are praised, drafting is not."""
    return CODE if moment.idle >= 10 or 0 < moment.streak < 2 else TRANSLATION


def _shy(moment: Moment) -> Odds:
    """Drafts fail unless the two steps before were drafted too: the single probe is misled."""
    return CODE if moment.streak >= 2 else TRANSLATION


def _processes() -> list[Process]:
    named: dict[str, Callable[[Moment], Odds]] = {
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
        "ageing drafter": _ageing(0.85, 0.3, 2000),
        "improving drafter": _ageing(0.05, 0.8, 2000),
        "two kinds, half each": _kinds("half", [(0.5, CODE), (0.5, TRANSLATION)]),
        "two kinds, one in eight good": _kinds("eighth", [(0.125, CODE), (0.875, TRANSLATION)]),
        "three kinds": _kinds("three", [(0.3, CODE), (0.4, CHAT), (0.3, TRANSLATION)]),
        "switch every 500": _turns(500, [CODE, TRANSLATION]),
        "switch every 300": _turns(300, [CODE, TRANSLATION]),
        "switch of three": _turns(400, [TRANSLATION, CHAT, CODE]),
        "requests that switch": _within(150, [CHAT, CODE]),
    }
    made = [Process(name, law) for name, law in named.items()]
    made.append(Process("bursts of code", steady(CODE), load=_bursts))
    made.append(Process("bursts of chat", steady(CHAT), load=_bursts))
    short = _kinds("short", [(0.5, CODE), (0.5, CHAT)], life=40)
    made.append(Process("short requests of two kinds", short, life=40))
    made.append(Process("adversary: honeypot", _honeypot, watches=True))
    made.append(Process("adversary: shy", _shy, watches=True))
    return made


def _held_out() -> list[Process]:
    named: dict[str, Callable[[Moment], Odds]] = {
        "steady 0.1": steady(level(0.1)),
        "steady 0.3": steady(level(0.3)),
        "steady 0.5": steady(level(0.5, fall=0.9)),
        "steady 0.7": steady(level(0.7, fall=0.94)),
        "steady 0.9": steady(level(0.9, fall=0.99)),
        "collapse after 1": steady((0.85, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)),
        "collapse after 3": steady((0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1)),
        "all or nothing 0.5": steady(_all_or_nothing(0.5)),
        "drift of 800": _drift(0.15, 0.85, 800),
        "two kinds, 7 in 10 good": _kinds("seven", [(0.7, level(0.8)), (0.3, level(0.15))]),
        "switch every 230": _turns(230, [level(0.75), level(0.12)]),
        "switch every 410": _turns(410, [level(0.05), level(0.9), level(0.45)]),
        "requests that switch to translation": _within(200, [CODE, TRANSLATION]),
    }
    made = [Process(name, law) for name, law in named.items()]
    short = _kinds("short, three", [(0.4, CODE), (0.3, CHAT), (0.3, TRANSLATION)], life=90)
    made.append(Process("short requests of three kinds", short, life=90))
    return made


# The constants of the policy were chosen on the first; the others had no part in that.
PROCESSES: tuple[Process, ...] = tuple(_processes())
HELD_OUT: tuple[Process, ...] = tuple(_held_out())


def recorded(name: str, accepted: Sequence[Sequence[int]], window: int = 25) -> Process:
    """Traffic as it was: per request the accepted counts of its steps, all K verified each time.

    The law at a step is that of the steps around it; a seat replays one request after another.
    """
    if not accepted or not all(accepted):
        raise ValueError(f"recording {name}: found a request without steps, wanted at least one")
    laws = [_smoothed(counts, window) for counts in accepted]

    def law(moment: Moment) -> Odds:
        number = _number(moment.clock, moment.seat, LIFE)
        mine = laws[int(_drawn(moment.seat, number, name) * len(laws))]
        return mine[int(moment.clock) % len(mine)]

    return Process(name, law)


def _smoothed(counts: Sequence[int], window: int) -> list[Odds]:
    found = []
    for step in range(len(counts)):
        near = counts[max(0, step - window) : step + window + 1]
        odds = []
        for position in range(MOST):
            reached = sum(count >= position for count in near)
            stood = sum(count > position for count in near)
            odds.append((stood + 0.5) / (reached + 1.0))
        found.append(tuple(odds))
    return found


# Two made-up machines for the simulator: a small CPU, and a GPU that has time to spare.

BATCHES = (1, 2, 4, 8, 16, 32, 64)
Seconds = Callable[[int, int], float]  # of a batch and the drafts of each of its requests


def cpu() -> StepCosts:
    """Like a 135M target on two cores: 36.5 ms bare, and every verified token counts."""

    def verify(batch: int, drafts: int) -> float:
        beyond = max(0, batch * (1 + drafts) - 8)
        return 1e-3 * (35.8 + 0.73 * batch + 0.35 * batch * drafts + 0.12 * beyond)

    def draft(batch: int, k: int) -> float:
        return 1e-3 * (0.8 + (5.5 + 0.36 * batch * k if k else 0.0))

    return _costs(verify, draft)


def gpu() -> StepCosts:
    """Memory-bound up to 256 tokens a pass; drafting costs a tenth of a step."""

    def verify(batch: int, drafts: int) -> float:
        tokens = batch * (1 + drafts)
        return 1e-3 * (8.0 + 0.01 * batch + 0.001 * tokens + 0.025 * max(0, tokens - 256))

    def draft(batch: int, k: int) -> float:
        return 1e-3 * (0.05 + (0.8 + 0.001 * batch * k if k else 0.0))

    return _costs(verify, draft)


def _costs(verify: Seconds, draft: Seconds) -> StepCosts:
    places = range(MOST + 1)
    return StepCosts(
        verify={batch: {drafts: verify(batch, drafts) for drafts in places} for batch in BATCHES},
        draft={batch: {k: draft(batch, k) for k in places} for batch in BATCHES},
    )


MACHINES: dict[str, Callable[[], StepCosts]] = {"cpu": cpu, "gpu": gpu}

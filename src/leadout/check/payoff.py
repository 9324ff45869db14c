"""Whether drafting pays: the measured acceptance length against the break-even of a tuned file.

That a pair fits is a property of its two models. Whether drafting is faster depends on the machine
and the load as well: a step with K drafts takes longer than a bare step, and break-even is the
acceptance length at which both yield as many tokens per second. Only `leadout tune` measures those
costs, so without its file nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from leadout.check.result import (
    CheckResult,
    LoadPayoff,
    OfflineAcceptance,
    Outcome,
    Payoff,
)
from leadout.control.tuned_file import Tuned, read_tuned
from leadout.models import local_folder
from leadout.stats import Interval


def read_costs(path: Path, target: str, drafter: str) -> Tuned:
    """The tuned file of this pair; that of another pair is refused."""
    tuned = read_tuned(path)
    tuned.require_pair(local_folder(target), local_folder(drafter))
    return tuned


def payoff(offline: OfflineAcceptance, tuned: Tuned) -> Payoff:
    """Of the acceptance that a check measured."""
    lengths = dict(enumerate(offline.by_draft_tokens[: tuned.block_size - 1], start=1))
    return payoff_of(lengths, tuned)


def payoff_of(lengths: Mapping[int, Interval], tuned: Tuned) -> Payoff:
    """At each measured load with the K that suits it best, and for all loads together.

    `lengths` are acceptance lengths by K. Drafting pays if it pays at one load at least: K can be
    0 at the others.
    """
    loads = []
    for batch in sorted(tuned.verify):
        options = [
            LoadPayoff(
                concurrency=batch,
                draft_tokens=k,
                break_even=tuned.break_even_length(batch, k),
                length=length,
            )
            for k, length in lengths.items()
        ]
        loads.append(max(options, key=lambda each: each.length.value / each.break_even))
    return Payoff(outcome=_overall({load.outcome for load in loads}), loads=loads)


def _overall(outcomes: set[Outcome]) -> Outcome:
    if "pays" in outcomes:
        return "pays"
    return "does not pay" if outcomes == {"does not pay"} else "undecided"


def pays_sentence(result: CheckResult) -> str:
    """Whether drafting pays, or the command that measures it."""
    pays = result.pays
    if pays is None:
        return (
            "Whether drafting pays depends on the machine: measure it with `leadout tune "
            f"{result.target} {result.drafter}`."
        )
    if pays.outcome == "pays":
        paying = [load for load in pays.loads if load.outcome == "pays"]
        where = ", ".join(str(load.concurrency) for load in paying)
        return f"It pays at these numbers of concurrent requests: {where}; {_compared(paying[0])}."
    if pays.outcome == "does not pay":
        return f"It does not pay at any measured load: {_compared(pays.loads[0])}."
    load = next(each for each in pays.loads if each.outcome == "undecided")
    return f"Whether it pays is undecided: {_compared(load)}."


def _compared(load: LoadPayoff) -> str:
    return (
        f"at {load.concurrency} with K = {load.draft_tokens} the acceptance length is "
        f"{load.length:.2f}, break-even is {load.break_even:.2f}"
    )

"""The result of `leadout make`: whether the drafter pays, how to serve it, a page with the reasons.

Numbers come from the results of the stages, which have reports of their own beside this one.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from leadout.check.payoff import pays_sentence
from leadout.check.report import sentence as check_sentence
from leadout.check.result import CheckResult, LoadPayoff, Verdict
from leadout.console import facts_table, table
from leadout.control.tuned_file import Tuned
from leadout.data.manifest import Manifest
from leadout.errors import NEGATIVE, SUCCESS, UNDECIDED, printable
from leadout.files import write_text
from leadout.make.expected import Expectation
from leadout.make.plan import STAGES, StageName
from leadout.make.settings import MakeSettings
from leadout.make.stages import Places, server_flags
from leadout.make.state import MakeState
from leadout.models import last_part
from leadout.provenance import machine, redacted
from leadout.report import html
from leadout.stats import Interval
from leadout.train.export import TrainReport
from leadout.tune import report as tune_report

Outcome = Literal["pays", "does not pay", "not expected to pay", "unfit", "undecided"]
_EXIT_CODES: dict[Outcome, int] = {
    "pays": SUCCESS,
    "does not pay": NEGATIVE,
    "not expected to pay": NEGATIVE,
    "unfit": NEGATIVE,
    "undecided": UNDECIDED,
}
_TONES: dict[Outcome, html.Tone] = {
    "pays": "good",
    "does not pay": "warning",
    "not expected to pay": "warning",
    "unfit": "bad",
    "undecided": "warning",
}


@dataclass(frozen=True, slots=True)
class Results:
    """Of the stages that are complete."""

    costs: Tuned
    data: Manifest | None = None
    training: TrainReport | None = None
    check: CheckResult | None = None
    tuned: Tuned | None = None

    def with_tuned(self, tuned: Tuned, check: CheckResult) -> Results:
        return dataclasses.replace(self, tuned=tuned, check=check)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageSummary(_Record):
    name: StageName
    minutes: float
    result: str


class MakeResult(_Record):
    target: str
    out: str
    outcome: Outcome
    reasons: list[str]  # sentences
    serve: str  # the command
    files: dict[str, str]  # by what they are
    expectation: Expectation | None
    acceptance_length: Interval | None  # offline, of the check
    speedup: dict[int, Interval]  # by concurrent requests, with the K of the tuned file
    stages: list[StageSummary]

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.outcome]


def result_of(
    settings: MakeSettings, state: MakeState, places: Places, results: Results
) -> MakeResult:
    outcome, reasons = _judged(state, results)
    tuned, check = results.tuned, results.check
    speedup = {} if tuned is None else {row.batch: row.speedup for row in tune_report.rows(tuned)}
    offline = None if check is None else check.offline
    return MakeResult(
        target=settings.target,
        out=str(settings.out),
        outcome=outcome,
        reasons=reasons,
        serve=serve_command(settings, places, results),
        files={name: str(path) for name, path in _files(places).items() if path.exists()}
        | {"report": str(places.page)},
        expectation=state.expectation,
        acceptance_length=None if offline is None else offline.overall.length,
        speedup=speedup,
        stages=[
            StageSummary(name=name, minutes=state.stages[name].seconds / 60, result=text)
            for name, text in _summaries(results).items()
            if name in state.stages
        ],
    )


def _judged(state: MakeState, results: Results) -> tuple[Outcome, list[str]]:
    expected, check, tuned = state.expectation, results.check, results.tuned
    if check is None:
        assert expected is not None
        remedy = (
            "Nothing was generated or trained. A larger budget may help (--hours), or fewer draft "
            "tokens (block_size in --train-config); --anyway goes on all the same."
        )
        return "not expected to pay", [expected.sentence(), remedy]
    if tuned is None:
        return "unfit", [check_sentence(check)]
    reasons = [_capital(tune_report.verdict(tuned)), check_sentence(check)]
    warning = tune_report.overhead_warning(tuned)
    reasons += [] if warning is None else [warning]
    if tuned.max_drafts == 0:
        return "does not pay", [*reasons, _why_not(results)]
    if check.verdict is Verdict.UNDECIDED:
        return "undecided", reasons
    return "pays", reasons


def _why_not(results: Results) -> str:
    """What keeps a trained drafter from paying, and what may change that."""
    assert results.check is not None
    pays, training = results.check.pays, results.training
    compared = "" if pays is None else pays_sentence(results.check)
    ahead = "" if training is None or training.outlook is None else training.outlook.text()
    told = [_capital(each) for each in (compared, ahead) if each]
    return " ".join([*told, "More training text and time may raise acceptance."])


def serve_command(settings: MakeSettings, places: Places, results: Results) -> str:
    """The line that serves the result best: without the drafter, if that does not pay."""
    flags = redacted(server_flags(settings))
    if results.tuned is None:
        words = shlex.join(["leadout", "serve", settings.target])
    else:
        words = tune_report.next_command(results.tuned, places.tuned)
    return f"{words} {shlex.join(flags)}" if flags else words


def _files(places: Places) -> dict[str, Path]:
    return {
        "drafter": places.drafter,
        "tuned": places.tuned,
        "check": places.check,
        "costs": places.costs,
        "data": places.data,
    }


def _summaries(results: Results) -> dict[StageName, str]:
    """One line for each stage that has a result."""
    found: dict[StageName, str] = {}
    batch = min(results.costs.verify)
    k = max(k for k in results.costs.draft[batch] if k)
    found["costs"] = (
        f"a step with {k} drafts takes {results.costs.break_even_length(batch, k):.2f} times as "
        f"long as one without, with {batch} concurrent request{'s' if batch > 1 else ''}"
    )
    if results.data is not None:
        counts = results.data.counts.values()
        samples, tokens = (
            sum(getattr(each, name) for each in counts) for name in ("samples", "response_tokens")
        )
        found["data"] = f"{samples:,} answers with {tokens:,} tokens"
    if results.training is not None:
        served = results.training.served
        found["train"] = (
            f"{results.training.steps:,} steps in {results.training.minutes:.0f} minutes; "
            f"acceptance length {served.served:.2f} served, {served.predicted:.2f} predicted"
        )
    if results.check is not None:
        found["check"] = check_sentence(results.check)
    if results.tuned is not None:
        found["tune"] = tune_report.verdict(results.tuned)
    return {name: found[name] for name in STAGES if name in found}


def print_result(made: MakeResult, console: Console | None = None) -> None:
    console = console or Console()
    style = "bold green" if made.outcome == "pays" else "bold yellow"
    console.print(Text(made.outcome.upper(), style=style))
    for each in made.reasons:
        console.print(Text(printable(each)))
    rows = [(each.name, f"{each.minutes:.1f}", each.result) for each in made.stages]
    console.print(table(None, ("stage", "minutes", "result"), rows, left=3))
    console.print(facts_table(list(made.files.items())))
    console.print(Text("Next:"))
    console.print(Text(printable(f"  {made.serve}")), soft_wrap=True)


def write_page(made: MakeResult, results: Results, state: MakeState, path: Path) -> None:
    write_text(path, page(made, results, state))


def page(made: MakeResult, results: Results, state: MakeState) -> str:
    sections = [
        html.Section("", [html.Command(made.serve, label="Serve with:")]),
        _stages(made),
        *([] if state.expectation is None else [_expected(state.expectation)]),
        *([] if results.tuned is None else [_measured(results)]),
        _reports(made),
    ]
    date = max((each.ended for each in state.stages.values()), default="")[:10]
    return html.render(
        html.Page(
            command="make",
            heading=f"a drafter for {last_part(made.target)}",
            facts=[each for each in (date, machine(), results.costs.dtype) if each],
            verdict=html.Verdict(_TONES[made.outcome], made.reasons, word=made.outcome),
            cards=_cards(made, state),
            sections=sections,
        )
    )


def _cards(made: MakeResult, state: MakeState) -> list[html.Card]:
    cards = []
    if made.speedup:
        batch, best = max(made.speedup.items(), key=lambda item: item[1].value)
        detail = f"with {batch} concurrent requests, {best.low:.2f} to {best.high:.2f}"
        cards.append(html.Card("speed-up", f"{best.value:.2f}", detail))
    if made.acceptance_length is not None:
        length = made.acceptance_length
        cards.append(
            html.Card(
                "tokens per step", f"{length.value:.2f}", f"{length.low:.2f} to {length.high:.2f}"
            )
        )
    minutes = sum(record.seconds for record in state.stages.values()) / 60
    cards.append(html.Card("minutes", f"{minutes:.0f}", f"{len(state.stages)} stages"))
    return cards


def _stages(made: MakeResult) -> html.Section:
    rows = [[each.name, each.result, f"{each.minutes:.1f}"] for each in made.stages]
    return html.Section("Stages", [html.Table(("stage", "result", "minutes"), rows, 2)])


_HEADS = ("concurrent requests", "K", "break-even", "acceptance length")


def _expected(found: Expectation) -> html.Section:
    text = (
        f"Before training: about {found.blocks:,} blocks were expected to give an acceptance "
        f"length of {found.low:.2f} to {found.high:.2f}. That is a guess from the training of "
        "another, small model. Break-even was measured with an untrained drafter of the same shape."
    )
    return html.Section(
        "What was expected",
        [html.Text(text, soft=True), html.Table(_HEADS, _rows(found.loads), text_columns=0)],
    )


def _measured(results: Results) -> html.Section:
    assert results.tuned is not None
    blocks: list[html.Block] = []
    pays = None if results.check is None else results.check.pays
    if pays is not None:
        text = "Acceptance of the check against break-even of the tuned file; 95% intervals."
        blocks += [html.Text(text, soft=True), html.Table(_HEADS, _rows(pays.loads), 0)]
    rows = [
        [str(row.batch), str(row.k), str(row.speedup)] for row in tune_report.rows(results.tuned)
    ]
    blocks.append(html.Table(("concurrent requests", "K", "speed-up"), rows, 0))
    return html.Section("What was measured", blocks)


def _rows(loads: list[LoadPayoff]) -> list[list[str]]:
    return [
        [
            str(load.concurrency),
            str(load.draft_tokens),
            f"{load.break_even:.2f}",
            f"{load.length.low:.2f} to {load.length.high:.2f}",
        ]
        for load in loads
    ]


def _reports(made: MakeResult) -> html.Section:
    rows = [[name, path] for name, path in made.files.items()]
    return html.Section("Files", [html.Table(("what", "where"), rows, 2)])


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

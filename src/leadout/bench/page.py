"""A bench as one HTML file: no scripts, nothing loaded, every text escaped."""

from __future__ import annotations

from html import escape

from leadout.bench import charts
from leadout.bench.result import BenchResult
from leadout.bench.words import (
    CONCURRENCY,
    HOW,
    LATENCY_HEADS,
    latency_rows,
    mean_rows,
    prediction_words,
    throughput_heads,
    throughput_rows,
)
from leadout.pages.html import document, folded, table


def page(result: BenchResult) -> str:
    name = f"{result.settings.target}: {', '.join(result.arms)}"
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(_circumstances(result))}</p>',
        f'<p class="soft">{escape(HOW)}</p>',
        _means(result),
        *(_of_set(result, prompt_set) for prompt_set in result.settings.prompts),
        _titled("Acceptance by position", charts.acceptance(result)),
        _latency(result),
        _predictions(result),
        _how_made(result),
    ]
    return document(f"leadout bench: {name}", parts)


def _circumstances(result: BenchResult) -> str:
    settings, provenance = result.settings, result.provenance
    facts = [
        f"{settings.rounds} rounds",
        f"{settings.output_tokens} output tokens a request",
        provenance.machine,
        provenance.date,
    ]
    return " · ".join(facts)


def _means(result: BenchResult) -> str:
    chart = charts.mean_speedup(result)
    if not chart:
        return ""
    heads = [CONCURRENCY, *result.compared_arms]
    return (
        "<h2>Speed-up over bare vLLM, geometric mean of the prompt sets</h2>"
        f"{chart}{table(heads, mean_rows(result), words=1)}"
    )


def _of_set(result: BenchResult, prompt_set: str) -> str:
    return (
        f"<h2>{escape(prompt_set)}</h2>{charts.speedup_of_set(result, prompt_set)}"
        f"{table(throughput_heads(result), throughput_rows(result, prompt_set), words=1)}"
        f"{folded('Latency', table(LATENCY_HEADS, latency_rows(result, prompt_set), words=2))}"
    )


def _latency(result: BenchResult) -> str:
    shown = "".join(
        f"<h3>{concurrency} at a time</h3>{charts.latency(result, concurrency)}"
        for concurrency in result.settings.concurrencies
    )
    return f"<h2>Latency of a token</h2>{shown}"


def _predictions(result: BenchResult) -> str:
    explained = f'<p class="soft">{escape(prediction_words(result))}</p>'
    return _titled("Predicted against measured", charts.predictions(result), explained)


def _titled(heading: str, chart: str, explained: str = "") -> str:
    return f"<h2>{escape(heading)}</h2>{explained}{chart}" if chart else ""


def _how_made(result: BenchResult) -> str:
    arms = [
        [
            arm.name,
            arm.kind,
            arm.drafter or "",
            "" if arm.draft_tokens is None else str(arm.draft_tokens),
        ]
        for arm in result.settings.arms
    ]
    flags = f"<p>All servers: <code>{escape(' '.join(result.settings.flags))}</code></p>"
    command = f"<p>Made by: <code>{escape(result.provenance.command)}</code></p>"
    versions = [list(pair) for pair in result.provenance.versions.items()]
    content = (
        table(["arm", "kind", "drafter", "K"], arms, words=3)
        + flags
        + command
        + table(["", "version"], versions, words=2)
    )
    return folded("Arms, settings and versions", content)

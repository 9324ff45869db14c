"""The README's table of evidence: the strongest results, with their counts and files."""

from __future__ import annotations

from typing import Any

import qwen_tables
from result_tables import (
    BENCH,
    LIVE_BENCH,
    ROOT,
    interval,
    live_mean,
    result,
    speedup,
    table,
    with_interval,
)

PICTURE = "learn/picture.json"
MIN_REPAIRED = 0.99  # of the healthy acceptance


def evidence() -> str:
    """One row for each fact: what, the number with its interval, of how many, and the file."""
    rows = [
        *_silent_faults(),
        *_check(),
        *_speed(),
        *_useless(),
        *_learning(),
        *_kills(),
        *_lossless(),
    ]
    return table(("what", "measured", "n", "file"), rows)


def learn_picture() -> str:
    """Speed of a server while its drafter is replaced; nothing until it was measured."""
    if not (ROOT / "results" / PICTURE).exists():
        return ""
    found = result(PICTURE)
    speeds = found["tokens_per_second"]
    before, after = (interval(speeds[when], digits=1) for when in ("before", "after"))
    minutes = (found["swapped"] - found["learner_started"]) / 60
    image = PICTURE.replace(".json", ".svg")
    return (
        f"![Tokens per second before, during and after learning]({{root}}results/{image})\n\n"
        f"One server answers {found['clients']} requests at a time, of a kind that its drafter "
        "has never seen. `leadout learn` runs on the same machine, with one core for each of the "
        f"two. It collects some of the requests, trains on {found['learnt_from_requests']} of them "
        f"for {found['training_seconds'] / 60:.0f} minutes and compares the new version on others; "
        f"{minutes:.0f} minutes after its start, the server swaps in the new version without a "
        "restart. Tokens per second on held-out requests: "
        f"{before} before, {after} after, {interval(found['ratio'])} times as many. Failed "
        f"requests: {found['failed_requests']} of {found['requests']:,} "
        f"([result]({{root}}results/{PICTURE}))."
    )


def _row(what: str, measured: str, n: str, name: str) -> tuple[str, ...]:
    return what, measured, n, f"[{name.partition('/')[0]}]({{root}}results/{name})"


def _silent_faults() -> list[tuple[str, ...]]:
    rows = result("faults/tiny.json")["faults"]
    stock = sum(row["stock"] == "serves, no error" for row in rows)
    ours = sum(row["leadout"].startswith("serves; ") for row in rows)
    return [
        _row(
            "broken pairs served without an error by stock vLLM; served without an error or a "
            "warning by vLLM with Leadout",
            f"**{stock}**, {ours}",
            f"{len(rows)} seeded faults",
            "faults/tiny.json",
        )
    ]


def _check() -> list[tuple[str, ...]]:
    found = result("check/faults.json")
    summary, whole = found["summary"], found["healthy_acceptance"]
    repaired = [each["repaired"] / whole for each in found["faults"] if each["repaired"]]
    good = sum(share >= MIN_REPAIRED for share in repaired)
    name = "check/faults.json"
    return [
        _row(
            "faults that cost 2% of acceptance or more, found by `leadout check`",
            f"**{summary['of_these_found']}**",
            f"{summary['faults_that_cost_2_percent']} faults",
            name,
        ),
        _row(
            f"repaired by `--fix`, to at least {MIN_REPAIRED:.0%} of the healthy acceptance",
            f"**{good}**",
            f"{len(repaired)} that an edit can undo",
            name,
        ),
        _row(
            "healthy drafters reported as faulty",
            f"**{summary['false_alarms']}**",
            f"{summary['healthy']} variants",
            name,
        ),
    ]


def _speed() -> list[tuple[str, ...]]:
    bench = result(BENCH)
    means = {(each["arm"], each["concurrency"]): each for each in bench["geometric_means"]}
    most = max(load for _, load in means)
    settings, larger = bench["settings"], qwen_tables.settings()
    return [
        _row(
            "speed over bare vLLM, one request at a time: SmolLM2-135M, tuned",
            f"**{speedup(means['tuned', 1])}**",
            f"{len(settings['prompts'])} prompt sets, {settings['rounds']} rounds",
            BENCH,
        ),
        _row(
            f"the same with {most} requests at a time, with whole blocks as in plain vLLM",
            speedup(means["fixed", most]),
            f"{len(settings['prompts'])} prompt sets, {settings['rounds']} rounds",
            BENCH,
        ),
        _row(
            f"the same with `--live`, 1 and {most} requests at a time; on CPUs this includes "
            "prompt lookup",
            f"**{speedup(live_mean(1))}**, **{speedup(live_mean(most))}**",
            f"{len(settings['prompts'])} prompt sets, {settings['rounds']} rounds",
            LIVE_BENCH,
        ),
        _row(
            "speed over bare vLLM on code, 1 and 4 requests at a time: Qwen2.5-Coder-1.5B in int8, "
            f"drafter trained for {result(qwen_tables.TRAINING)['training_minutes']:.0f} minutes",
            f"**{speedup(qwen_tables.mean_at(1))}**, {speedup(qwen_tables.mean_at(4))}",
            f"{len(larger['prompts'])} prompt sets, {larger['rounds']} rounds",
            qwen_tables.BENCH,
        ),
        _row(
            "the same with `--live`; on CPUs this includes prompt lookup",
            f"**{speedup(qwen_tables.mean_at(1, 'live'))}**, "
            f"**{speedup(qwen_tables.mean_at(4, 'live'))}**",
            f"{len(larger['prompts'])} prompt sets, {larger['rounds']} rounds",
            qwen_tables.BENCH,
        ),
    ]


def _useless() -> list[tuple[str, ...]]:
    cells = result("live/useless.json")["cells"]
    worst = with_interval(min(cells, key=lambda cell: cell["ratio"]), "")
    without = "without_prompt_lookup"
    worst_without = with_interval(min(cells, key=lambda cell: cell[without]), without)
    return [
        _row(
            "speed of `--live` with a drafter of random weights over bare vLLM, at the worst load: "
            "with prompt lookup (CPUs), without it (async scheduling, as on GPUs)",
            f"**{worst}**, **{worst_without}**",
            f"{len(cells)} loads",
            "live/useless.json",
        )
    ]


def _learning() -> list[tuple[str, ...]]:
    """The seed with the median acceptance of each kind of requests."""
    name = "learn/states.json"
    found, drift = result(name), result("learn/drift.json")
    rows = []
    for kind, seeds in found["ring"].items():
        row = sorted(seeds, key=lambda each: each["acceptance_after"]["value"])[len(seeds) // 2]
        rows.append(
            _row(
                f"acceptance length on traffic of a new kind ({kind}), before and after learning "
                f"from {found['requests']} requests; {row['seconds_to_swap'] / 60:.0f} minutes "
                "from the first one to the swap",
                f"{row['acceptance_before']['value']:.2f}, **{interval(row['acceptance_after'])}**",
                f"{found['measured_prompts']} held-out requests, {len(seeds)} seeds",
                name,
            )
        )
    rows.append(
        _row(
            f"change in acceptance through learning on drifting traffic, {drift['swaps']} swaps",
            f"**{_change(drift['change'])}**",
            f"{drift['requests']} requests",
            "learn/drift.json",
        )
    )
    return rows


def _kills() -> list[tuple[str, ...]]:
    classes = result("reliability/faults.json")["classes"]
    kills = [each for each in classes if each["result"].startswith("kills_")]
    return [
        _row(
            "requests, samples or versions lost when servers, learners and writers are killed",
            f"**{sum(each['lost'] for each in kills)}**",
            f"{sum(each['cases'] for each in kills):,} kills",
            "reliability/faults.json",
        ),
        _row(
            "the same under all kinds of faults: damaged files, full disks, failing storage ...",
            f"**{sum(each['lost'] for each in classes)}**",
            f"{sum(each['cases'] for each in classes):,} cases of {len(classes)} kinds",
            "reliability/faults.json",
        ),
    ]


def _lossless() -> list[tuple[str, ...]]:
    arms = result("lossless/smollm2.json")["arms"]
    changed = sum(arm["prompts"] - arm["equal_texts"] for arm in arms)
    return [
        _row(
            "greedy answers that drafts change, in float32",
            f"**{changed}**",
            f"{sum(arm['prompts'] for arm in arms)} answers",
            "lossless/smollm2.json",
        )
    ]


def _change(found: Any) -> str:
    return f"{found['value']:+.1%} ({found['low']:+.1%} to {found['high']:+.1%})"

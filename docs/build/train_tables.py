"""Tables on training experiments; see fill_docs.py."""

from typing import Any

from result_tables import blocks_of, interval, result, table

from leadout.make.expected import LEARNING_CURVE


def ablations() -> str:
    found = result("train/ablations.json")
    families = {"goes on": "a half-trained drafter", "starts anew": "scratch"}
    rows = [
        (families[each["family"]], name, f"{each['acceptance_length']:.3f}")
        for name, each in found["variants"].items()
    ]
    return table(("starts from", "variant", "held-out acceptance length"), rows)


def proxies() -> str:
    """Runs from random weights that differ in one setting, and their gain over the baseline."""
    found = result("train/proxies.json")
    rows = []
    for name, arm in found["arms"].items():
        seeds = arm["seeds"].values()
        lengths = [f"{each['acceptance_length']['value']:.3f}" for each in seeds]
        gain, cost = arm.get("gain"), arm.get("times_the_processor_time_per_block")
        rows.append(
            (
                name,
                ", ".join(lengths),
                "" if gain is None else interval(gain, digits=3),
                "" if cost is None else f"{cost:.2f}",
            )
        )
    heads = ("setting", "acceptance length, by seed", "gain over the baseline")
    return table((*heads, "processor time of a block, relative to the baseline"), rows)


def proxies_settings() -> str:
    found = result("train/proxies.json")
    settings = found["settings"]
    return (
        f"{found['blocks']:,} blocks of {settings['block_size']} tokens on {found['samples']} "
        f"answers, with learning rate {settings['learning_rate']:g} and "
        f"{settings['batch_sequences'] * settings['anchors']:,} blocks in a step; acceptance "
        f"length on {found['held_out_texts']} held-out greedy answers. Gains are paired by text, "
        "with 95% intervals over texts."
    )


def proxies_reading() -> str:
    found = result("train/proxies.json")
    arms, longer = found["arms"], blocks_of(result("train/smollm2.json")) / found["blocks"]

    def gain(name: str) -> str:
        value = arms[name]["gain"]["value"]
        return "nothing" if abs(value) < 0.01 else f"{value:+.2f}"

    deeper = arms["4 layers"]["times_the_processor_time_per_block"]
    return (
        "At this length the number of steps is what limits: twice the blocks give "
        f"{gain('twice the blocks')} and half the batch {gain('half the batch')}, while twice the "
        f"text for the same number of blocks gives {gain('twice the text')}. A learning rate of "
        f"0.008 gives {gain('learning rate 0.008')} at no cost, and four layers "
        f"{gain('4 layers')} for {deeper:.1f} times the time of a block. Blocks that start where "
        f"decoding lands (`walk`) give {gain('walk')}. There is one seed of each, so that "
        "the intervals do not contain the noise of initial weights, and longer runs may differ: "
        f"that of the shipped drafter has {longer:.0f} times as many blocks."
    )


def text_limit() -> str:
    """Acceptance on held-out answers and on those trained on, during one run."""
    rows = [
        (f"{each['blocks']:,}", f"{each['held_out']:.2f}", f"{each['trained_on']:.2f}")
        for each in result("train/text_limit.json")["curve"]
    ]
    return table(("blocks", "held-out answers", "answers trained on"), rows)


def text_limit_reading() -> str:
    found = result("train/text_limit.json")
    settings, last = found["settings"], found["curve"][-1]
    answer = found["response_tokens"] / found["answers"]
    visits = last["blocks"] / found["answers"] / answer * (settings["first_block_size"] - 1)
    return (
        f"The text has {found['response_tokens']:,} tokens of {found['answers']:,} answers. At the "
        f"last of these points each token had been drafted about {visits:.0f} times in training, "
        f"and the drafter accepted {last['trained_on'] - last['held_out']:.2f} tokens more per "
        "step on answers that it was trained on. The run was stopped there."
    )


def first_weights() -> str:
    """The shipped drafter's run, and an earlier one that started from copies of target layers."""
    files = {
        "random weights": "train/smollm2.json",
        "target layers": "train/from_target_layers.json",
    }
    rows = [
        (name, f"{found['data_samples']:,}", f"{blocks:,}", f"{length:.2f}")
        for name, found in ((name, result(file)) for name, file in files.items())
        for blocks, length in curve_of(found)
        if blocks in nearest(found)
    ]
    return table(("starts from", "answers", "blocks", "held-out acceptance length"), rows)


def expected_lengths() -> str:
    """What `leadout make` expects; a test compares it with the shipped drafter's run."""
    rows = [(f"{each.blocks:,}", f"{each.low:.2f} to {each.high:.2f}") for each in LEARNING_CURVE]
    return table(("blocks", "acceptance length, worst to best set"), rows)


def curve_of(found: Any) -> list[tuple[int, float]]:
    """Held-out acceptance length by blocks seen, over consecutive runs."""
    curve, before = [], 0
    for part in found["runs"]:
        per_step = part["settings"]["batch_sequences"] * part["settings"]["anchors"]
        points = part["held_out_curve"]
        curve += [(before + p["step"] * per_step, p["acceptance_length"]) for p in points]
        before = curve[-1][0]
    return curve


def nearest(found: Any) -> set[int]:
    """Blocks at the validations nearest to whole millions of blocks, and at the last one."""
    seen = [blocks for blocks, _ in curve_of(found)]
    marks = range(1_000_000, seen[-1], 1_000_000)
    return {min(seen, key=lambda blocks: abs(blocks - mark)) for mark in marks} | {seen[-1]}


def against_speculators() -> str:
    found = result("train/against_speculators.json")
    rows = [
        (
            name,
            seed,
            f"{each['acceptance_length']['value']:.3f} ({each['acceptance_length']['low']:.3f} to "
            f"{each['acceptance_length']['high']:.3f})",
            f"{each['blocks']:,}",
            f"{each['processor_minutes']:.2f}",
        )
        for name, seeds in found["arms"].items()
        for seed, each in seeds.items()
    ]
    gap = found["difference"]["acceptance_length"]
    headings = ("trainer", "seed", "held-out acceptance length", "blocks", "CPU minutes")
    return (
        table(headings, rows).rstrip("\n")
        + f"\n\nDifference over all seeds: {gap['value']:.3f} ({gap['low']:.3f} to "
        + f"{gap['high']:.3f}); CPU time: {found['processor_time_ratio']:.2f} of speculators'."
    )


def against_speculators_one_seed() -> str:
    arms = result("train/against_speculators_one_seed.json")["arms"]
    rows = [
        (
            name,
            f"{each['acceptance_length']:.3f}",
            f"{each['blocks']:,}",
            f"{each['processor_minutes']:.1f}",
        )
        for name, each in sorted(arms.items(), key=lambda arm: -arm[1]["acceptance_length"])
    ]
    return table(("trainer", "held-out acceptance length", "blocks", "CPU minutes"), rows)

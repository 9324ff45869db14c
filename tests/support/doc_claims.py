"""Phrases with numbers by page, each built from the result file or the code that has the number."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import scale_tables
import worth_tables

from leadout.check import long_context, lossless, prefix_cache
from leadout.check.baseline import MIN_SHARED
from leadout.check.diagnosis import MAX_HALF_WIDTH, MIN_TEXTS
from leadout.check.settings import CheckSettings
from leadout.check.trials import FINALISTS, LARGE_GAIN, SCREEN_EVERY
from leadout.control.policy import PROBE_TIME_SHARE, ladder_up_to
from leadout.control.prompt_lookup import MIN_MATCH
from leadout.control.tuned_file import NEARLY_EQUAL
from leadout.engine.metrics import DEFAULT_BREAK_EVEN, DEFAULT_MINUTES
from leadout.engine.request_metrics import MIN_STEPS
from leadout.evaluate.prompts import MIN_NEW_PROMPTS
from leadout.learn.config import LearnConfig
from leadout.learn.data import MAX_HELD_OUT, MAX_LENGTH, MAX_REQUESTS, POOL_CYCLES
from leadout.learn.gate import MAX_FACTOR, MIN_REQUESTS, POWER
from leadout.pairing import batched_tokens_for
from leadout.pairing.devices import A100, BANDWIDTH_SHARE, H100, PREFILL_SHARE
from leadout.train.costs import NETWORK, TRAINING_SHARE
from leadout.train.states_source import SERVER_MEMORY
from support.gpu_dispatch import IN_FLIGHT, MODES
from support.models import ROOT
from support.ops_files import rules

SHIPPED = ROOT / "drafters" / "smollm2-135m-instruct-dflash"
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def word(number: int) -> str:
    return _WORDS[number]


def _tpus() -> list[str]:
    arms = result("tpu/drafts.json")["arms"]
    stock, right, wide = arms["stock"], arms["overrides"], arms["overrides and wide heads"]
    equal = [each["by_dtype"]["float32"]["equal_drafts"] for each in (right, wide)]
    rounded = [each["by_dtype"]["bfloat16"]["equal_drafts"] for each in (right, wide)]
    return [
        if_true(
            equal == [right["drafts"]] * 2,
            f"all {right['drafts']} drafts in {right['blocks']} blocks",
        ),
        f"In bfloat16 {rounded[0]} and {rounded[1]} of them are",
        f"Without the overrides only {stock['by_dtype']['float32']['equal_drafts']} are",
    ]


def if_true(condition: bool, phrase: str) -> str:
    """A phrase that holds under a condition; otherwise one that no page has."""
    return phrase if condition else f"NOT TRUE ANY MORE: {phrase}"


def claims() -> dict[str, list[str]]:
    learned, candidates = LearnConfig.model_fields, result("learn/gate.json")["candidates"]
    (duration,) = {rule["for"] for rule in rules() if rule.get("alert") == "LeadoutBelowBreakEven"}
    return {
        "README.md": [_faults(), *_readme_speed(), *_readme_training()],
        "docs/alternatives.md": [
            f"{name} {version}" for name, version in versions_of_alternatives().items()
        ],
        "docs/concepts/acceptance-length.md": _acceptance_length(),
        "docs/concepts/break-even.md": [_loss_at_sixteen(), f"default to {DEFAULT_BREAK_EVEN}"],
        "docs/concepts/dflash.md": _dflash(),
        "docs/concepts/lossless.md": _lossless(),
        "docs/decisions.md": [
            "0.1.0 and 0.9.0",  # the pins of .ci/environment
            f"{8192 // batched_tokens_for(1, 15)} requests decode at K = 15",
            f"prompts of {batched_tokens_for(1024, 15):,} tokens",
        ],
        "docs/gpus.md": _gpus(),
        "docs/howto/check.md": _howto_check(),
        "docs/howto/make.md": [f"takes {SERVER_MEMORY:.0%} of their memory"],
        "docs/howto/states.md": [f"the server takes {SERVER_MEMORY:.0%} of the memory"],
        "docs/howto/tpus.md": _tpus(),
        "docs/howto/metrics.md": [
            f"for {duration.removesuffix('m')} minutes",
            f"({DEFAULT_BREAK_EVEN}) for ({DEFAULT_MINUTES:g})",
            f"fewer than {MIN_STEPS} such steps",
        ],
        "docs/howto/long-context.md": [
            f"the whole interval is below {prefix_cache.MIN_RATIO}",
            f"the same {word(long_context.TASKS)} tasks",
            f"if the gain is {LARGE_GAIN:.0%} or more",
            f"the ratio is below {long_context.MIN_RATIO}",
            f"({CheckSettings.model_fields['long_context'].default} by default)",
            f"of up to {CheckSettings.model_fields['long_context'].default} tokens",
        ],
        "docs/howto/train.md": _howto_train(),
        "docs/index.md": [_faults()],
        "docs/learn.md": [
            *_gate(),
            f"at most {learned['base_loss'].default:.0%}",
            f"the newest {MAX_REQUESTS:,} requests",
            f"at most {MAX_HELD_OUT} of the held-out requests are compared",
            f"cut to {MAX_LENGTH:,} tokens",
            f"{word(len(candidates)).capitalize()} prepared candidates",
        ],
        "docs/limits.md": _limits(),
        "docs/live.md": [
            f"({', '.join(map(str, ladder_up_to(15)))} for blocks of 16)",
            *_live_simulated(),
            _live_budget(),
            *_useless(),
            *_prompt_lookup(),
        ],
        "docs/quickstart.md": _quickstart(),
        "docs/results.md": _results(),
        "docs/scale.md": _scale(),
        "docs/tune.md": [f"({NEARLY_EQUAL:.0%})"],
        "docs/worth-it.md": _worth_it(),
    }


def versions_of_alternatives() -> dict[str, str]:
    """Versions of the alternatives; those that tests use are pinned where CI installs them."""
    pinned = (ROOT / ".ci" / "environment").read_text()
    found = dict(re.findall(r"\b(dflash|speculators)==([\d.]+)", pinned))
    return {
        "speculators": found["speculators"],
        "dflash": found["dflash"],
        "SpecForge": "0.3",
        "dflash-mlx": "0.1.8",
    }


def supported_vllm() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = project["optional-dependencies"]["cpu"]
    return found


def _faults() -> str:
    rows = result("faults/tiny.json")["faults"]
    silent = sum(row["stock"] == "serves, no error" for row in rows)
    return f"stock vLLM serves {silent} of {len(rows)} deliberately broken pairs"


def _gpus() -> list[str]:
    cells = result("gpu/dispatch.json")["cells"]
    chosen = [cell["full"] for cell in cells if cell["mode"] != MODES[0].name]
    return [
        f"{word(IN_FLIGHT)} batches in flight",
        f"the smallest share is {100 * min(chosen):.1f}%",
    ]


def _readme_speed() -> list[str]:
    tuned = result("bench/smollm2-tuned.json")
    first, *_, last = tuned["table"]
    return [
        f"from {first[2]} at one request to none above {last[0] - 1}",
        f"no significant gain above {tuned['loses_above']} requests",
    ]


def _readme_training() -> list[str]:
    run = result("train/smollm2.json")
    served = {name: f"{each['served']:.2f}" for name, each in run["acceptance"].items()}
    return [
        f"{run['training_minutes']:.0f} minutes of training",
        f"an acceptance length of {served['gsm8k']} on gsm8k, {served['humaneval']} on humaneval "
        f"and {served['mt_bench']} on mt_bench",
    ]


def _acceptance_length() -> list[str]:
    sets = result("train/smollm2.json")["acceptance"]
    worst = max(each["difference"] for each in sets.values())
    return [f"On the {word(len(sets))} sets above the two differ by {worst:.1%} at most"]


def _loss_at_sixteen() -> str:
    tuned = result("bench/smollm2-tuned.json")
    bare, verify, draft = (
        tuned[part]["16"][k]["value"]
        for part, k in (("verify", "0"), ("verify", "5"), ("draft", "5"))
    )
    length = tuned["acceptance"]["tokens"]["5"]["value"]
    return if_true(
        round((verify + draft) / bare) == 3 > 2 > length,
        "At sixteen the same drafts are a loss: a step takes three times as long and yields "
        "fewer than two tokens",
    )


def _dflash() -> list[str]:
    step = result("bench/profile.json")["by_batch_size"]["1"]
    weights = (SHIPPED / "model.safetensors").stat().st_size / 2  # bfloat16
    return [
        f"has {weights / 1e6:.1f} million weights",
        f"of a step of {step['step']:.1f} ms the target's layers take {step['target layers']:.1f} "
        f"ms, the draft layers {step['drafter, layers']:.1f} ms and the drafter's output head "
        f"{step['drafter, head']:.1f} ms",
    ]


def _lossless() -> list[str]:
    arms = result("lossless/smollm2.json")["arms"]
    largest = max(arm["batch_size"] for arm in arms)
    checked = result("quickstart/check.json")["lossless"]
    return [
        f"The reference decodes {arms[0]['prompts']} prompts",
        if_true(
            all(arm["equal_texts"] == arm["prompts"] for arm in arms),
            f"in batches of {largest}: all texts equal plain decoding",
        ),
        f"{checked['equal_texts']} of {checked['texts']} texts are equal with and without drafts",
    ]


def _howto_check() -> list[str]:
    longest = CheckSettings.model_fields["long_context"].default
    return [
        f"Fisher's exact test, p < {lossless.MAX_P_VALUE:g}",
        f"at least {MIN_NEW_PROMPTS} others remain",
        f"up to {longest} tokens",
        f"significantly below {long_context.MIN_RATIO:g} of that in the shortest",
        if_true(SCREEN_EVERY == 3, "screened on a third of the texts"),
        f"The best {word(FINALISTS)} are then tested",
        f"wider than ±{MAX_HALF_WIDTH:.0%} of its value",
        f"fewer than {word(MIN_TEXTS)} texts",
        f"fewer than {word(MIN_SHARED)} shared prompts",
    ]


def _howto_train() -> list[str]:
    run = result("train/smollm2.json")
    return [
        f"took {run['training_minutes']:.0f} minutes of training",
        f"its {run['data_response_tokens']:,} tokens of text",
        f"trained with {run['runs'][0]['settings']['learning_rate']}",
    ]


def _useless() -> list[str]:
    """Live control with a drafter of random weights."""
    cells = result("live/useless.json")["cells"]
    as_served = [f"{cell['ratio']:.2f}" for cell in cells]
    without = [f"{cell['without_prompt_lookup']:.2f}" for cell in cells]
    return [
        f"{', '.join(as_served[:-1])} and {as_served[-1]} of bare vLLM",
        f"{', '.join(without[:-1])} and {without[-1]} without prompt lookup",
        "at 1, 4, 8 and 16 requests",
    ]


def _useless_range() -> list[str]:
    cells = result("live/useless.json")["cells"]
    as_served = [cell["ratio"] for cell in cells]
    without = [cell["without_prompt_lookup"] for cell in cells]
    return [
        f"[{min(as_served):.2f} to {max(as_served):.2f} of bare vLLM's speed]",
        f"intervals down to {min(cell['low'] for cell in cells):.2f}",
        f"{min(without):.2f} to {max(without):.2f} without prompt lookup",
    ]


def _gate() -> list[str]:
    found = result("learn/gate_cycles.json")
    return [
        f"than {word(POOL_CYCLES)} cycles need",
        f"{word(round(10 * POWER))} in ten",
        f"more than {word(MAX_FACTOR)} times the requests",
        f"fewer than {MIN_REQUESTS} requests",
        f"{word(found['cycles']).capitalize()} cycles that each lose",
        f"each lose {found['loss_each_cycle']:.0%} on the base",
        f"with {found['traffic_gain']:.0%} more acceptance",
    ]


def _limits() -> list[str]:
    settings = result("bench/smollm2.json")["settings"]
    return [
        f"in {word(settings['rounds'])} rounds",
        f"one pair and {word(len(settings['prompts']))} kinds of text",
        *_useless_range(),
    ]


def _live_simulated() -> list[str]:
    simulated = result("control/simulator.json")
    fair = [cell for cell in simulated["cells"] if not cell["adversary"]]
    lured = min(cell["of_bare"] for cell in simulated["cells"] if cell["adversary"])
    below = simulated["held_out"]["below_bound"]
    one_kind = [cell for cell in below if cell[0] == "requests that switch to translation"]
    wrong = max(
        steps for each in simulated["wrong_prior_steps"].values() for steps in each.values()
    )
    return [
        f"for about {PROBE_TIME_SHARE:.0%} of the time",
        f"one of {len({cell['batch'] for cell in fair})} batch sizes",
        f"at least {simulated['bound']} of the oracle's tokens per second",
        *(_distance(fair, held_out) for held_out in (False, True)),
        f"Of the {len(below)} cells below the bound, {len(one_kind)} are one kind",
        "every 200 steps",  # of control_simulator/traffic.py
        f"lasts {wrong} steps at most",
        f"the worst cell has {min(cell['of_bare'] for cell in fair):.3f}",
        f"{lured:.2f} of a bare engine in the worst cell",
    ]


def _distance(fair: list[Any], held_out: bool) -> str:
    cells = [cell for cell in fair if cell["held_out"] == held_out]
    kinds = len({cell["traffic"] for cell in cells})
    near = sum(cell["of_oracle"] >= 0.97 for cell in cells)
    mean = sum(cell["of_oracle"] for cell in cells) / len(cells)
    worst = min(cell["of_oracle"] for cell in cells)
    return (
        f"({kinds} kinds): {near} of {len(cells)} cells; {mean:.3f} on average, {worst:.3f} in "
        "the worst"
    )


def _live_budget() -> str:
    found = result("live/budget.json")
    half = max(cell["p50"] for cell in found["cells"] if cell["requests"] == 256)
    return (
        f"With 256 requests it takes {half:.2f} ms at the median and {found['largest_p99']:.2f} ms "
        f"at the 99th percentile; the goal of {found['bound']} ms"
    )


def _prompt_lookup() -> list[str]:
    copying = result("control/copying.json")
    row = copying["by_match"][str(MIN_MATCH)]["all"]
    return [
        f"the last {MIN_MATCH} tokens",
        f"{row['offered']:.0%} of the steps have such a draft, and {row['stood_per_offer']:.1f} of "
        f"its {copying['k']} tokens are accepted",
    ]


def _quickstart() -> list[str]:
    checked = result("quickstart/check.json")
    offline, served = checked["offline"]["overall"]["length"], checked["served"][0]["length"]
    return [
        f"yields {offline['value']:.2f} tokens on average offline and {served:.2f} served",
    ]


def _results() -> list[str]:
    first = result("train/from_target_layers.json")["runs"][-1]["settings"]
    vocabulary = json.loads((SHIPPED / "config.json").read_text())["vocab_size"]
    longer = result("train/text_limit.json")["settings"]
    return [
        f"blocks of {word(longer['first_block_size'])} tokens; acceptance at every position",
        f"drafted in blocks of {word(longer['block_size'])} tokens",
        f"blocks of {first['block_size']}",
        f"the target's own of {vocabulary:,} rows",
    ]


def _scale() -> list[str]:
    large = scale_tables.LARGE
    target, shape = large.target, large.shape
    return [
        f"{target.num_layers} layers of width {target.hidden_size} with {target.num_kv_heads} KV "
        f"heads of {target.head_dim}, and a drafter of {large.layers} layers with {large.taps} "
        "taps",
        if_true(
            round(target.num_layers / large.layers) == 7
            and shape.num_kv_heads == target.num_kv_heads,
            f"{large.layers} draft layers next to {target.num_layers} target layers need "
            "one seventh more KV cache",
        ),
        f"{scale_tables.SAMPLES:,} samples of {scale_tables.LENGTH:,} tokens",
        f"{scale_tables.DRAFT_LAYERS} layers and {scale_tables.TAPS} taps, blocks of "
        f"{scale_tables.BLOCK_SIZE} and {scale_tables.ANCHORS} of them per sequence",
        f"{H100.operations / 1e12:.0f} TFLOP/s, of which prefill reaches {PREFILL_SHARE:.0%} "
        f"and training {TRAINING_SHARE:.0%}",
        f"{NETWORK / 1e9:.0f} GB/s of network for each GPU",
    ]


def _worth_it() -> list[str]:
    first, second, third = (f"{each:.0%}" for each in worth_tables.PROBABILITIES)
    costs = worth_tables.costs("Qwen3-8B", H100)
    smallest = worth_tables.costs(next(iter(worth_tables.TARGETS)), H100)
    mixture = worth_tables.TARGETS["gpt-oss-120b"].experts
    assert mixture is not None
    ladder = [k for k in ladder_up_to(worth_tables.K) if k]
    gains = [
        worth_tables.costs(name, A100).best(32, 0.5, ladder)[1] for name in worth_tables.TARGETS
    ]
    read = 1 - (1 - mixture.active / mixture.count) ** 32
    share = smallest.draft_seconds(1, worth_tables.K) / smallest.bare_seconds(1)
    return [
        f"a probability of {first}, {second} or {third}",
        f"the best of {ladder[0]}, {ladder[1]} and {ladder[2]} in each case",
        f"gains {worth_tables.MIN_GAIN - 1:.0%}",
        f"Where {worth_tables.K} drafts are a loss",
        if_true(
            max(gains) < worth_tables.MIN_GAIN,
            "With 32 requests and half of the drafts accepted, there is nothing to gain on an A100 "
            "with any of these targets",
        ),
        if_true(read > 0.5, "With 32 requests most experts are read anyway"),
        if_true(0.29 < share < 0.38, "a draft pass takes a third of a bare step"),
        f"a context of {costs.context:,} tokens, a drafter of {costs.draft_layers} layers with "
        f"{costs.taps} taps and blocks of {costs.block_size}",
        f"reaches {BANDWIDTH_SHARE:.0%} of the bandwidth and {PREFILL_SHARE:.0%} of the operations",
    ]

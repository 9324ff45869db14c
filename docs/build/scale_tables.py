"""Tables on scale: measured for a small model, computed for a large one; see fill_docs.py."""

import json
import statistics

from result_tables import ROOT, blocks_of, result, table

# A dense target of eight billion weights, and a drafter of the usual five layers for it.
LARGE = {"hidden": 4096, "ffn": 12288, "kv": 8 * 128, "layers": 36, "draft_layers": 5, "taps": 5}


def bytes_per_token() -> str:
    config = json.loads(
        (ROOT / "drafters" / "smollm2-135m-instruct-dflash" / "config.json").read_text()
    )
    hidden, taps = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    kv = config["num_key_value_heads"] * config["head_dim"]
    draft, target = config["num_hidden_layers"], config["num_target_layers"]
    rows = [
        ("text as token ids, at most 6 digits and a comma", "up to 7", "up to 7"),
        (
            "target states on disk: (taps + 1) x width x 2",
            f"{(taps + 1) * hidden * 2:,}",
            f"{(LARGE['taps'] + 1) * LARGE['hidden'] * 2:,}",
        ),
        (
            "drafter's keys and values in the server: 4 x draft layers x KV width",
            f"{4 * draft * kv:,}",
            f"{4 * LARGE['draft_layers'] * LARGE['kv']:,}",
        ),
        (
            "target's keys and values, for comparison",
            f"{4 * target * kv:,}",
            f"{4 * LARGE['layers'] * LARGE['kv']:,}",
        ),
    ]
    return table(("bytes per token", "SmolLM2-135M", "a dense 8B"), rows)


def seconds_per_million() -> str:
    bench, tuned = result("bench/smollm2.json"), result("bench/smollm2-tuned.json")
    rates = [
        cell["tokens_per_second"]["median"]
        for cell in bench["cells"]
        if cell["arm"] == "bare" and cell["concurrency"] == 16
    ]
    run = result("train/smollm2.json")
    per_block = 60 * run["training_minutes"] / blocks_of(run)
    (step,) = (
        cell["p50"]
        for cell in result("live/budget.json")["cells"]
        if (cell["requests"], cell["kind"]) == (64, "graphs")
    )
    rows = [
        (
            "generate a million tokens, 16 requests at a time",
            f"{1e6 / statistics.median(rates):,.0f} s",
        ),
        ("prefill a million tokens", f"{1e6 * tuned['prefill_bare']['per_token']:,.0f} s"),
        ("train on a million blocks", f"{1e6 * per_block:,.0f} s"),
        ("live control of one step of 64 requests", f"{1000 * step:.0f} microseconds"),
    ]
    return table(("SmolLM2-135M on two CPU cores", "time"), rows)


def large_drafter() -> str:
    weights = large_drafter_weights()
    return table(
        ("a drafter for a dense 8B", ""),
        [
            ("weights", f"{weights / 1e9:.2f} billion"),
            ("file, bfloat16", f"{2 * weights / 1e9:.1f} GB"),
            ("checkpoint of a run, 16 bytes per weight", f"{16 * weights / 1e9:.0f} GB"),
            ("gradients summed over ranks per step, float32", f"{4 * weights / 1e9:.1f} GB"),
            ("states of a million tokens, if stored", f"{_states(1e6) / 1e9:.0f} GB"),
            ("states of 800 million tokens, if stored", f"{_states(8e8) / 1e12:.0f} TB"),
        ],
    )


def large_drafter_weights() -> int:
    """Projections of the layers and `fc`; norms are negligible."""
    hidden = LARGE["hidden"]
    layer = 2 * hidden * hidden + 2 * hidden * LARGE["kv"] + 3 * hidden * LARGE["ffn"]
    return LARGE["draft_layers"] * layer + LARGE["taps"] * hidden * hidden


def _states(tokens: float) -> float:
    return tokens * (LARGE["taps"] + 1) * LARGE["hidden"] * 2


def fleet() -> str:
    """1,000 replicas of 4 GPUs that each generate 2,000 tokens per second."""
    replicas, rate, k = 1000, 2000, 7
    captured = replicas * rate // 100
    drafter = 2 * large_drafter_weights()
    return table(
        ("1,000 replicas of 4 GPUs, 2,000 tokens per second each", ""),
        [
            (
                f"Prometheus series of Leadout, K = {k}: 1 + K + 5 per replica",
                f"{replicas * (6 + k):,}",
            ),
            ("tuned files", "1 per kind of machine"),
            ("tokens captured per second, with 1% of requests", f"{captured:,}"),
            (
                "capture files of the whole fleet, 7 bytes per token",
                f"{7 * captured / 1e3:,.0f} kB/s",
            ),
            ("the same per day", f"{7 * captured * 86400 / 1e9:.0f} GB"),
            ("seconds until a million tokens are captured", f"{1e6 / captured:.0f}"),
            (
                "read from storage when all replicas load a new drafter",
                f"{replicas * drafter / 1e12:.1f} TB",
            ),
        ],
    )

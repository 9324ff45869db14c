"""Tables on scale: measured for a small model, computed for a large one; see fill_docs.py."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace

from result_tables import ROOT, blocks_of, result, table

from leadout.engine.request_metrics import BUCKETS
from leadout.pairing.devices import H100, H200
from leadout.pairing.sizes import sizes_from_config
from leadout.train.costs import FLOAT8, Layout, Work, best_layout, devices_for_weights

# Targets to plan for, by the fields of their config.json.
_QWEN3_235B = {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
_DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def dense_config(hidden: int, layers: int, heads: int, mlp: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


TARGETS = {
    name: sizes_from_config(config, name)
    for name, config in {
        "Qwen3-8B": dense_config(4096, 36, 32, 12288, 151936),
        "Llama-3.3-70B": dense_config(8192, 80, 64, 28672, 128256),
        "Qwen3-235B-A22B": _QWEN3_235B,
        "DeepSeek-V3": _DEEPSEEK_V3,
    }.items()
}
# Bytes of a weight as served: the two large ones in FP8.
SERVED_BYTES = {"Qwen3-8B": 2, "Llama-3.3-70B": 2, "Qwen3-235B-A22B": 1, "DeepSeek-V3": 1}
DEVICES = {"Qwen3-8B": H100, "Llama-3.3-70B": H100, "Qwen3-235B-A22B": H200, "DeepSeek-V3": H200}
SAMPLES, LENGTH = 800_000, 2048
DRAFT_LAYERS = TAPS = 5
BLOCK_SIZE, ANCHORS = 8, 512
WORK = {
    name: Work.of(
        sizes,
        layers=DRAFT_LAYERS,
        taps=TAPS,
        block_size=BLOCK_SIZE,
        anchors=ANCHORS,
        length=float(LENGTH),
    )
    for name, sizes in TARGETS.items()
}
LARGE = WORK["Qwen3-8B"]  # "a dense 8B"


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
            f"{LARGE.state_bytes_per_token():,}",
        ),
        (
            "drafter's keys and values in the server: 4 x draft layers x KV width",
            f"{4 * draft * kv:,}",
            f"{LARGE.shape.kv_bytes_per_token(LARGE.layers):,}",
        ),
        (
            "target's keys and values, for comparison",
            f"{4 * target * kv:,}",
            f"{2 * LARGE.target.kv_values_per_token:,}",
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
    weights = LARGE.parameters
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


def _states(tokens: float) -> float:
    return tokens * LARGE.state_bytes_per_token()


def training_sizes() -> str:
    """What servers and trainers hold, for each target."""

    def row(label: str, cell: Callable[[str], str]) -> tuple[str, ...]:
        return (label, *(cell(name) for name in TARGETS))

    def gigabytes(count: float) -> str:
        return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e9:.1f} GB"

    tokens = SAMPLES * LENGTH
    return table(
        ("", *TARGETS),
        [
            row(
                "weights, and those that a token passes through",
                lambda n: (
                    f"{TARGETS[n].parameters / 1e9:,.0f}B, "
                    f"{TARGETS[n].active_parameters / 1e9:.0f}B"
                ),
            ),
            row(
                "weights as served",
                lambda n: (
                    f"{gigabytes(_served_bytes(n))} "
                    f"({'FP8' if SERVED_BYTES[n] == 1 else 'bfloat16'})"
                ),
            ),
            row(
                "smallest server",
                lambda n: (
                    f"{_server_size(n)} x {DEVICES[n].name} ({DEVICES[n].memory / 1e9:.0f} GB)"
                ),
            ),
            row(
                "drafter: heads, KV heads, MLP width",
                lambda n: (
                    f"{WORK[n].shape.num_heads}, {WORK[n].shape.num_kv_heads}, "
                    f"{WORK[n].shape.mlp_width:,}"
                ),
            ),
            row("drafter: weights", lambda n: f"{WORK[n].parameters / 1e9:.1f}B"),
            row(
                "trainer: drafter, gradients, Muon; whole on each GPU",
                lambda n: gigabytes(WORK[n].weight_bytes()),
            ),
            row(
                "the same, sharded over 8 GPUs",
                lambda n: gigabytes(WORK[n].weight_bytes(shards=8)),
            ),
            row(
                "trainer: embedding, head and norm of the target",
                lambda n: gigabytes(WORK[n].target_bytes("served")),
            ),
            row(
                "draft KV cache in serving, bytes per token",
                lambda n: f"{WORK[n].shape.kv_bytes_per_token(DRAFT_LAYERS):,}",
            ),
            row(
                "states, bytes per token: bfloat16, FP8",
                lambda n: (
                    f"{WORK[n].state_bytes_per_token():,}, "
                    f"{WORK[n].state_bytes_per_token(FLOAT8):,}"
                ),
            ),
            row(
                f"states of {SAMPLES:,} samples, if stored in bfloat16",
                lambda n: f"{tokens * WORK[n].state_bytes_per_token() / 1e12:,.0f} TB",
            ),
        ],
    )


def training_layouts() -> str:
    """How many GPUs serve and train, how fast, and what limits them."""
    return table(
        (
            "target",
            "GPUs",
            "serve states, train",
            "tokens per second",
            "between them: bfloat16, FP8",
            "limited by",
            f"hours for {SAMPLES:,} samples",
        ),
        [_layout_row(name, layout) for name, layout in layouts()],
    )


def layouts() -> list[tuple[str, Layout]]:
    """8B on 1 GPU, 70B on 8, the two mixtures on 2 to 8 nodes."""
    small = ("Qwen3-8B", Layout(WORK["Qwen3-8B"], DEVICES["Qwen3-8B"], servers=0, trainers=1))
    found = [small]
    sizes = {"Llama-3.3-70B": (8,), "Qwen3-235B-A22B": (16, 32, 64), "DeepSeek-V3": (16, 32, 64)}
    for name, counts in sizes.items():
        for count in counts:
            best = best_layout(
                WORK[name], count, server_size=_server_size(name), device=DEVICES[name]
            )
            found.append((name, best))
    return found


def _layout_row(name: str, layout: Layout) -> tuple[object, ...]:
    split = f"{layout.servers}, {layout.trainers}" if layout.servers else "one does both"
    wire = "none"
    if layout.servers:
        small = replace(layout, bytes_per_value=FLOAT8)
        wire = " and ".join(f"{each.bytes_per_second / 1e9:.1f}" for each in (layout, small))
        wire = f"{wire} GB/s"
    return (
        name,
        f"{layout.servers + layout.trainers} x {layout.device.name}",
        split,
        f"{layout.tokens_per_second:,.0f}",
        wire,
        layout.bottleneck,
        f"{layout.hours(SAMPLES * LENGTH):,.0f}",
    )


def _served_bytes(name: str) -> float:
    return TARGETS[name].parameters * float(SERVED_BYTES[name])


def _server_size(name: str) -> int:
    return devices_for_weights(_served_bytes(name), DEVICES[name])


def fleet() -> str:
    """1,000 replicas of 4 GPUs that each generate 2,000 tokens per second."""
    replicas, rate, k = 1000, 2000, 7
    captured = replicas * rate // 100
    drafter = 2 * LARGE.parameters
    histogram = len(BUCKETS) + 3  # what is above all bounds, the sum and the number of requests
    return table(
        ("1,000 replicas of 4 GPUs, 2,000 tokens per second each", ""),
        [
            (
                f"Prometheus series of Leadout, K = {k}: 1 + K + 5 + {histogram} per replica",
                f"{replicas * (6 + k + histogram):,}",
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

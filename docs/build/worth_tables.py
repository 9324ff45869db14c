"""Tables of "Is it worth it for me?": computed from sizes and data sheets; see fill_docs.py."""

import json
from statistics import median

from result_tables import LOADS, ROOT, result, table
from scale_tables import TARGETS as LARGE_TARGETS
from scale_tables import dense_config

from leadout.control.policy import ladder_up_to
from leadout.pairing.decode_costs import DecodeCosts, acceptance_length
from leadout.pairing.devices import (
    A100,
    B200,
    BANDWIDTH_SHARE,
    H100,
    H200,
    L40S,
    PREFILL_SHARE,
    Device,
)
from leadout.pairing.sizes import TargetSizes, sizes_from_config

_QWEN_CODER = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_GPT_OSS = {
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}
TARGETS = {
    "Qwen2.5-Coder-1.5B": sizes_from_config(_QWEN_CODER, "Qwen2.5-Coder-1.5B"),
    "Qwen3-8B": LARGE_TARGETS["Qwen3-8B"],
    "Qwen3-32B": sizes_from_config(dense_config(5120, 64, 64, 25600, 151936), "Qwen3-32B"),
    "Llama-3.3-70B": LARGE_TARGETS["Llama-3.3-70B"],
    "gpt-oss-120b": sizes_from_config(_GPT_OSS, "gpt-oss-120b"),
}
MXFP4_BYTES = 17 / 32  # 4 bits, and a scale of 8 bits for 32 weights
DEVICES = (L40S, A100, H100, H200, B200)
REQUESTS = (1, 8, 32)
PROBABILITIES = (0.5, 0.7, 0.85)
K = 7  # of a block of 8
MIN_GAIN = 1.05  # less is no gain
MEASURED_K = ("1", "3", "5", "7")


def costs(name: str, device: Device, *, overlaps: bool = False) -> DecodeCosts:
    """In bfloat16; experts in MXFP4, as the mixture is published."""
    target = TARGETS[name]
    expert_bytes = 2.0 if target.experts is None else MXFP4_BYTES
    return DecodeCosts(
        target, device, block_size=K + 1, expert_bytes=expert_bytes, overlaps=overlaps
    )


def devices() -> str:
    rows = [
        (
            f"[{device.name}]({device.source})",
            f"{device.memory / 1e9:.0f} GB",
            f"{device.bandwidth / 1e12:.2f} TB/s",
            f"{device.operations / 1e12:,.0f} TFLOP/s",
            f"{balance(device):.0f}",
        )
        for device in DEVICES
    ]
    heads = ("GPU", "memory", "bandwidth", "bfloat16, dense")
    return table((*heads, "tokens per step in balance"), rows)


def balance(device: Device) -> float:
    """Tokens of a step for which a bfloat16 weight is read as long as it is computed with."""
    reading = 2 / (device.bandwidth * BANDWIDTH_SHARE)
    return reading * device.operations * PREFILL_SHARE / 2


def targets() -> str:
    rows = []
    for name in TARGETS:
        each = costs(name, H100)
        target = each.target
        one, many = (each.draft_seconds(load, K) / each.bare_seconds(load) for load in (1, 32))
        rows.append(
            (
                name,
                f"{target.parameters / 1e9:.1f}B",
                f"{target.active_parameters / 1e9:.1f}B",
                f"{100 * one:.0f}%",
                f"{100 * many:.0f}%",
            )
        )
    heads = ("target", "weights", "weights a token passes through")
    return table((*heads, "drafting, of a bare step of 1 request", "of 32 requests"), rows)


def break_even() -> str:
    rows = []
    for name in TARGETS:
        for requests in REQUESTS:
            cells = [
                f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{low:.1f}"
                for low, high in (_bounds(name, device, requests) for device in DEVICES)
            ]
            rows.append((name, requests, *cells))
    return table(("target", "requests", *(device.name for device in DEVICES)), rows)


def _bounds(name: str, device: Device, requests: int) -> list[float]:
    """Break-even if reading and computing overlap, and if not; the smaller one first."""
    both = (costs(name, device, overlaps=overlaps) for overlaps in (True, False))
    return sorted(each.break_even(requests, K) for each in both)


def speed_up() -> str:
    rows = []
    for name in TARGETS:
        for device in DEVICES:
            each = costs(name, device)
            cells = [
                ", ".join(_gain(each, requests, probability) for probability in PROBABILITIES)
                for requests in REQUESTS
            ]
            rows.append((name, device.name, *cells))
    heads = [f"{count} {'request' if count == 1 else 'requests'}" for count in REQUESTS]
    return table(("target", "GPU", *heads), rows)


def _gain(each: DecodeCosts, requests: int, probability: float) -> str:
    _, gain = each.best(requests, probability, ladder_up_to(K))
    return f"{gain:.1f}" if gain >= MIN_GAIN else "no"


def acceptance() -> str:
    lengths = [k for k in ladder_up_to(K) if k]
    rows = [
        (f"{probability:.0%}", *(f"{acceptance_length(probability, k):.2f}" for k in lengths))
        for probability in PROBABILITIES
    ]
    return table(("each draft accepted, if those before are", *(f"K = {k}" for k in lengths)), rows)


# Against what was measured


def small_target() -> TargetSizes:
    """SmolLM2-135M, from what its drafter's config says of it."""
    config = _drafter_config() | {"tie_word_embeddings": True}
    return sizes_from_config(config | {"num_hidden_layers": config["num_target_layers"]}, "SmolLM2")


def _drafter_config() -> dict[str, int]:
    folder = ROOT / "drafters" / "smollm2-135m-instruct-dflash"
    config: dict[str, int] = json.loads((folder / "config.json").read_text())
    return config


def fitted_costs() -> DecodeCosts:
    """For the machine of the tuned file: two of its numbers instead of a data sheet."""
    tuned, target = result("bench/smollm2-tuned.json"), small_target()
    size = {"float32": 4, "bfloat16": 2}[tuned["dtype"]]
    head = target.vocab_size * target.hidden_size
    operations = 2 * (target.active_parameters - head) / tuned["prefill_bare"]["per_token"]
    computing = 2 * target.active_parameters / operations
    reading = tuned["verify"]["1"]["0"]["value"] - computing
    device = Device("two cores", 0.0, size * target.active_parameters / reading, operations)
    return DecodeCosts(
        target,
        device,
        draft_layers=_drafter_config()["num_hidden_layers"],
        context=0,  # short texts
        weight_bytes=size,
        other_bytes=size,
        drafts_whole_blocks=tuned["runner"] != "V1",
        bandwidth_share=1.0,
        operations_share=1.0,
    )


def compared() -> dict[tuple[str, str], tuple[float, float]]:
    """Break-even by load and K: computed and measured."""
    tuned, computed = result("bench/smollm2-tuned.json"), fitted_costs()
    found = {}
    for load in LOADS:
        verify, draft = tuned["verify"][load], tuned["draft"][load]
        for k in MEASURED_K:
            measured = (verify[k]["value"] + draft[k]["value"]) / verify["0"]["value"]
            found[load, k] = computed.break_even(int(load), int(k)), measured
    return found


def measured() -> str:
    cells, device = compared(), fitted_costs().device
    rows = [
        (
            load,
            *(f"{cells[load, k][0]:.2f} and {cells[load, k][1]:.2f}" for k in MEASURED_K),
        )
        for load in LOADS
    ]
    errors = [abs(ours / theirs - 1) for ours, theirs in cells.values()]
    shown = table(("requests", *(f"K = {k}: computed and measured" for k in MEASURED_K)), rows)
    return (
        f"{shown}\n\nThe two numbers are {device.bandwidth / 1e9:.1f} GB/s and "
        f"{device.operations / 1e9:.0f} GFLOP/s. The {len(errors)} computed break-evens differ "
        f"from the measured ones by {100 * median(errors):.0f}% at the median and by "
        f"{100 * max(errors):.0f}% at most."
    )

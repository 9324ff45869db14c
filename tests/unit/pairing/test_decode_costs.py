"""Costs of a decoding step by arithmetic: recomputed by hand, and what holds for any target."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leadout.pairing.decode_costs import DecodeCosts, acceptance_length
from leadout.pairing.devices import A100, H100, L40S, Device
from leadout.pairing.sizes import TargetSizes, shape_for, sizes_from_config
from support.target_configs import CONFIGS

QWEN = sizes_from_config(CONFIGS["Qwen3-8B"], "Qwen3-8B")
MIXTURE = sizes_from_config(CONFIGS["gpt-oss-120b"], "gpt-oss-120b")
# One byte and one operation per second, and nothing else to take into account.
UNIT = Device("unit", memory=0.0, bandwidth=1.0, operations=1.0)
TINY = TargetSizes(
    hidden_size=8,
    num_layers=2,
    vocab_size=50,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_width=16,
    tied=False,
)
HEAD = 50 * 8
LAYERS = 2 * (2 * 8 * 4 * 3 + 3 * 8 * 16)


def unit_costs(**fields: float | bool) -> DecodeCosts:
    """Of the tiny target, without a context."""
    settings = {"context": 0, "bandwidth_share": 1.0, "operations_share": 1.0} | fields
    return DecodeCosts(TINY, UNIT, draft_layers=1, taps=3, block_size=4, **settings)  # type: ignore[arg-type]


def test_a_step_by_hand() -> None:
    costs = unit_costs()
    assert TINY.active_parameters == LAYERS + HEAD
    assert costs.bare_seconds(1) == 2 * (LAYERS + HEAD) + 2 * (LAYERS + HEAD)
    assert costs.verify_seconds(5, 3) == 2 * (LAYERS + HEAD) + 20 * 2 * (LAYERS + HEAD)
    overlapped = unit_costs(overlaps=True)
    assert overlapped.bare_seconds(1) == 2 * (LAYERS + HEAD)
    assert overlapped.verify_seconds(5, 3) == 20 * 2 * (LAYERS + HEAD)


def test_a_draft_pass_by_hand() -> None:
    shape = shape_for(TINY)
    context = 3 * 8 * 8
    layer = shape.parameters(1, 3) - context
    reading = 2 * (layer + context + HEAD)
    # A block of 4 slots, of which 3 are scored; context of the tokens of the step.
    assert unit_costs().draft_seconds(5, 1) == reading + 2 * 5 * (
        4 * layer + 3 * HEAD + 2 * context
    )
    needed = unit_costs(drafts_whole_blocks=False).draft_seconds(5, 1)
    assert needed == reading + 2 * 5 * (2 * layer + HEAD + 2 * context)


def test_the_cache_by_hand() -> None:
    without, with_context = unit_costs(), unit_costs(context=100)
    read = 3 * 100 * 2 * 2 * 1 * 4 * 2  # requests, tokens, layers, keys and values, KV width, bytes
    scored = 2 * 3 * 2 * (2 * 2 * 2 * 4 * 100)  # 3 requests of 2 tokens
    added = with_context.verify_seconds(3, 1) - without.verify_seconds(3, 1)
    assert added == pytest.approx(read + scored)
    # The drafter reads its own cache, and has at least as many heads.
    assert with_context.draft_seconds(3, 1) > without.draft_seconds(3, 1)


def test_break_even_and_speed_up_agree() -> None:
    costs = DecodeCosts(QWEN, H100)
    step = costs.verify_seconds(8, 7) + costs.draft_seconds(8, 7)
    assert costs.step_seconds(8, 7) == step
    assert costs.break_even(8, 7) == step / costs.bare_seconds(8)
    assert costs.speed_up(8, 7, costs.break_even(8, 7)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("overlaps", [True, False])
def test_drafts_never_come_for_free(name: str, overlaps: bool) -> None:
    costs = DecodeCosts(sizes_from_config(CONFIGS[name], name), H100, overlaps=overlaps)
    for requests in (1, 8, 32, 256):
        steps = [costs.step_seconds(requests, k) for k in (0, 1, 3, 7)]
        assert steps == sorted(steps)
        assert costs.break_even(requests, 1) > 1
        assert costs.bare_seconds(requests) < costs.bare_seconds(2 * requests) * 1.0001


def test_a_step_reads_each_weight_of_a_dense_target_once() -> None:
    # An 8B target in bfloat16 on an H100: 15 GB at 80% of 3.35 TB/s.
    costs = DecodeCosts(QWEN, H100, context=0, overlaps=True)
    assert costs.bare_seconds(1) == pytest.approx(2 * 7.568e9 / (0.8 * 3.35e12), rel=1e-3)
    assert costs.bare_seconds(1) == costs.verify_seconds(1, 7) == costs.verify_seconds(8, 7)


def test_verifying_costs_more_where_there_is_less_arithmetic_for_a_byte() -> None:
    by_device = {
        each.name: DecodeCosts(QWEN, each).break_even(32, 7) for each in (L40S, H100, A100)
    }
    assert by_device["L40S"] < by_device["H100"] < by_device["A100"]


def test_a_mixture_reads_more_experts_the_more_tokens_a_step_has() -> None:
    costs = DecodeCosts(MIXTURE, H100, overlaps=True, context=0)
    experts = MIXTURE.experts
    assert experts is not None
    one, many = costs.bare_seconds(1), costs.bare_seconds(10_000)
    head = MIXTURE.vocab_size * MIXTURE.hidden_size
    rate = H100.bandwidth * 0.8
    # One token reads what it passes through; very many read everything but the embedding.
    assert one == pytest.approx(2 * MIXTURE.active_parameters / rate)
    whole = replace(costs, device=replace(H100, operations=1e30))
    everything = MIXTURE.parameters - head - MIXTURE.hidden_size
    assert whole.bare_seconds(10_000) == pytest.approx(2 * everything / rate, rel=1e-6)
    assert many > one
    # Dense targets verify 7 drafts of one request for nearly nothing; a mixture does not.
    dense = DecodeCosts(QWEN, H100, overlaps=True, context=0)
    assert dense.verify_seconds(1, 7) == dense.bare_seconds(1)
    assert costs.verify_seconds(1, 7) > 3 * costs.bare_seconds(1)


def test_a_quantized_target_raises_break_even() -> None:
    plain, quantized = DecodeCosts(QWEN, H100), DecodeCosts(QWEN, H100, weight_bytes=1)
    assert quantized.bare_seconds(1) < plain.bare_seconds(1)
    assert quantized.break_even(1, 7) > plain.break_even(1, 7)


def test_acceptance_length_by_hand() -> None:
    assert acceptance_length(0.0, 7) == 1.0
    assert acceptance_length(1.0, 7) == 8.0
    assert acceptance_length(0.5, 2) == 1.75
    with pytest.raises(ValueError, match=r"is 1\.5, expected 0 to 1"):
        acceptance_length(1.5, 7)


def test_the_best_length_grows_with_acceptance_and_shrinks_with_load() -> None:
    costs, ladder = DecodeCosts(QWEN, H100), (0, 1, 3, 7)
    assert costs.best(1, 0.9, ladder)[0] == 7
    assert costs.best(256, 0.3, ladder)[0] == 1
    k, gain = costs.best(8, 0.7, ladder)
    assert gain == costs.speed_up(8, k, acceptance_length(0.7, k))
    assert all(gain >= costs.speed_up(8, each, acceptance_length(0.7, each)) for each in (1, 3, 7))
    assert costs.best(256, 0.0, ladder)[1] < 1

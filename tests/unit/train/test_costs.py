"""Costs by arithmetic: recomputed by hand, compared with real drafters, and split over machines."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from leadout.evaluate.blocks import BlockForward
from leadout.pairing import read_sizes
from leadout.pairing.devices import H100
from leadout.pairing.sizes import sizes_from_config
from leadout.train.costs import FLOAT8, Layout, Work, best_layout, devices_for_weights
from leadout.train.plan import work_of
from support.small_runs import MakeRun
from support.target_configs import CONFIGS


def work_for(name: str) -> Work:
    sizes = sizes_from_config(CONFIGS[name], name)
    return Work.of(sizes, layers=5, taps=5, block_size=8, anchors=512, length=2048.0)


QWEN, DEEPSEEK = work_for("Qwen3-8B"), work_for("DeepSeek-V3")


def test_bytes_and_weights_by_hand() -> None:
    assert QWEN.state_bytes_per_token() == (5 + 1) * 4096 * 2 == 49_152
    assert QWEN.state_bytes_per_token(FLOAT8) == 6 * (4096 + 4)
    assert DEEPSEEK.state_bytes_per_token() == 6 * 7168 * 2 == 86_016
    layer = 2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12288
    assert QWEN.parameters == pytest.approx(5 * layer + 5 * 4096**2, rel=1e-4)
    # float32 weights, gradients and momentum, and bfloat16 weights and gradients
    assert QWEN.weight_bytes() == QWEN.parameters * 16
    assert QWEN.weight_bytes(optimizer="adamw", precision="float32", shards=4) == (
        QWEN.parameters * 4
    )
    assert QWEN.target_bytes("served") == 2 * (2 * 151936 * 4096 + 4096)
    assert QWEN.target_bytes("in process") == pytest.approx(2 * (8.19e9 + 1.245e9), rel=0.01)
    # One pass of the target costs 2 operations for each of its weights and tokens.
    assert QWEN.target_operations == pytest.approx(2 * 6.95e9 * 2048, rel=0.01)


def test_a_narrow_mlp_and_few_candidates_cost_less() -> None:
    sizes = sizes_from_config(CONFIGS["Qwen3-8B"], "Qwen3-8B")
    small = Work.of(
        sizes,
        layers=5,
        taps=5,
        block_size=8,
        anchors=512,
        length=2048.0,
        mlp_width=4096,
        candidates=8192,
    )
    assert QWEN.parameters - small.parameters == 5 * 3 * 4096 * (12288 - 4096)
    layers = 6.0 * 8 * 5 * 3 * 4096 * (12288 - 4096)
    head = 6.0 * 7 * 4096 * (151936 - 8192)
    assert QWEN.operations_per_block - small.operations_per_block == layers + head
    more = dataclasses.replace(QWEN, candidates=10**6)  # than the vocabulary has
    assert more.operations_per_block == QWEN.operations_per_block


def test_operations_agree_with_what_torch_counts(make_run: MakeRun, target_folder: object) -> None:
    run = make_run(anchors=6)
    work = dataclasses.replace(work_of(run, read_sizes(target_folder)), length=40.0)  # type: ignore[arg-type]
    forward = BlockForward(run.drafter, run.target_weights.embedding)
    states = torch.randn(1, 40, len(run.drafter_config.target_layer_ids) * 64)
    anchors = torch.arange(10, 16)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(states, anchors, torch.zeros(1, 6, dtype=torch.int64))
    slots = work.block_size
    head = 6.0 * (slots - 1) * work.target.vocab_size * 64
    counted = work.context_operations + 6 * (work.operations_per_block - head)
    assert counter.get_total_flops() == pytest.approx(counted / 3, rel=0.01)  # without gradients


def test_devices_for_weights() -> None:
    assert [devices_for_weights(size, H100) for size in (16e9, 57e9, 141e9, 671e9)] == [1, 2, 4, 16]


def test_the_bottleneck_is_the_slowest_part() -> None:
    few_servers = Layout(QWEN, H100, servers=1, trainers=63)
    few_trainers = Layout(QWEN, H100, servers=63, trainers=1)
    slow_network = Layout(QWEN, H100, servers=8, trainers=8, network=1e6)
    layouts = (few_servers, few_trainers, slow_network)
    assert [each.bottleneck for each in layouts] == ["state servers", "trainers", "network"]
    halved = dataclasses.replace(slow_network, bytes_per_value=FLOAT8)
    assert halved.tokens_per_second == pytest.approx(2 * slow_network.tokens_per_second, rel=0.01)
    alone = Layout(QWEN, H100, servers=0, trainers=1)
    assert (alone.bottleneck, alone.bytes_per_second) == ("trainers", 0.0)


def test_the_best_split_is_better_than_others() -> None:
    best = best_layout(QWEN, 16, server_size=1)
    for servers in range(1, 16):
        other = Layout(QWEN, H100, servers, 16 - servers)
        assert other.tokens_per_second <= best.tokens_per_second
    with pytest.raises(ValueError, match="8 devices do not hold a server of 8"):
        best_layout(DEEPSEEK, 8, server_size=8)


def test_fewer_anchors_make_the_servers_the_bottleneck() -> None:
    rare = dataclasses.replace(QWEN, anchors=16)
    assert Layout(rare, H100, servers=8, trainers=8).bottleneck == "state servers"
    assert isinstance(rare, Work)

"""The drafter's parameters, its embedding and head, and what its attention sees."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from leadout.dflash.config import LayerAttention, Rope, Yarn
from leadout.dflash.drafter import INITIAL_STD, Drafter, RMSNorm

CPU = torch.device("cpu")


def shapes(drafter: Drafter) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def layer_shapes(i: int) -> dict[str, tuple[int, ...]]:
    return {
        f"layers.{i}.input_layernorm.weight": (32,),
        f"layers.{i}.post_attention_layernorm.weight": (32,),
        f"layers.{i}.self_attn.q_proj.weight": (96, 32),
        f"layers.{i}.self_attn.k_proj.weight": (48, 32),
        f"layers.{i}.self_attn.v_proj.weight": (48, 32),
        f"layers.{i}.self_attn.o_proj.weight": (32, 96),
        f"layers.{i}.self_attn.q_norm.weight": (24,),
        f"layers.{i}.self_attn.k_norm.weight": (24,),
        f"layers.{i}.mlp.gate_proj.weight": (48, 32),
        f"layers.{i}.mlp.up_proj.weight": (48, 32),
        f"layers.{i}.mlp.down_proj.weight": (32, 48),
    }


def test_state_is_that_of_a_published_checkpoint_and_nothing_else(make_config: Any) -> None:
    expected = {"fc.weight": (32, 96), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    assert shapes(Drafter(make_config(head_dim=24))) == (
        expected | layer_shapes(0) | layer_shapes(1)
    )


def test_state_with_everything_of_its_own(make_config: Any) -> None:
    config = make_config(
        layers=(LayerAttention(),),
        attention_bias=True,
        target_hidden_size=20,
        own_embedding=True,
        own_head=True,
        draft_vocab_size=40,
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    found = shapes(drafter)
    assert found["fc.weight"] == (32, 60)
    assert found["embed_tokens.weight"] == (61, 32)
    assert found["lm_head.weight"] == (40, 32)
    assert found["d2t"] == (40,)
    assert drafter.state_dict()["d2t"].dtype == torch.int64
    biases = {name: shape for name, shape in found.items() if name.endswith(".bias")}
    assert biases == {
        "layers.0.self_attn.q_proj.bias": (32,),
        "layers.0.self_attn.k_proj.bias": (16,),
        "layers.0.self_attn.v_proj.bias": (16,),
        "layers.0.self_attn.o_proj.bias": (32,),
    }


def test_fresh_weights(make_config: Any) -> None:
    torch.manual_seed(0)
    drafter = Drafter(make_config(hidden_size=128, own_embedding=True, attention_bias=True))
    for name, parameter in drafter.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(INITIAL_STD, rel=0.1), name


def run_block(drafter: Drafter, states: Tensor, embeddings: Tensor) -> Tensor:
    """One block right after the context, with every key visible."""
    batch, length, _ = states.shape
    positions = torch.arange(length + embeddings.shape[1]).expand(batch, -1)
    context = drafter.context_kv(drafter.context_features(states), positions[:, :length])
    masks = [None] * drafter.config.num_layers
    return drafter(embeddings, positions[:, length:], context, masks)


def test_drafter_built_on_meta_and_assigned_computes_the_same(make_drafter: Any) -> None:
    rope = Rope(1e4, Yarn(4.0, 64))
    loaded = make_drafter(rope=rope)
    with torch.device("meta"):
        assigned = Drafter(loaded.config)
    assigned.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    states, embeddings = torch.randn(1, 4, 96), torch.randn(1, 5, 32)
    assert torch.equal(
        run_block(assigned, states, embeddings), run_block(loaded, states, embeddings)
    )


def test_context_passes_no_layer_norm_and_every_layer_sees_the_same_feature(
    make_drafter: Any,
) -> None:
    drafter = make_drafter()
    features = drafter.context_features(torch.randn(1, 4, 96))
    positions = torch.arange(4)[None]
    before = drafter.context_kv(features, positions)
    with torch.no_grad():
        drafter.layers[1].input_layernorm.weight.mul_(3.0)
        drafter.layers[0].mlp.down_proj.weight.mul_(3.0)
    after = drafter.context_kv(features, positions)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.keys, new.keys)
        assert torch.equal(old.values, new.values)
    values = drafter.layers[1].self_attn.v_proj(features).view(1, 4, 2, 8).transpose(1, 2)
    assert torch.equal(after[1].values, values)


def test_early_slot_sees_late_slot_and_context(make_drafter: Any) -> None:
    drafter = make_drafter()
    states, embeddings = torch.randn(1, 4, 96), torch.randn(1, 5, 32)
    plain = run_block(drafter, states, embeddings)
    later, other = embeddings.clone(), states.clone()
    later[:, 4] += 1.0
    other[:, 0] += 1.0
    assert not torch.allclose(plain[:, 0], run_block(drafter, states, later)[:, 0], atol=1e-3)
    assert not torch.allclose(plain[:, 0], run_block(drafter, other, embeddings)[:, 0], atol=1e-3)


def test_blocks_sharing_a_row_equal_blocks_alone_and_train_every_weight(make_drafter: Any) -> None:
    drafter = make_drafter(attention_bias=True)
    torch.manual_seed(3)
    states = torch.randn(1, 9, 96)
    starts, block = (2, 5, 9), 4
    embeddings = torch.randn(1, len(starts) * block, 32)
    positions = torch.cat([start + torch.arange(block) for start in starts])[None]

    mask = torch.zeros(1, 1, len(starts) * block, 9 + len(starts) * block, dtype=torch.bool)
    for j, start in enumerate(starts):
        queries = slice(j * block, (j + 1) * block)
        mask[:, :, queries, :start] = True
        mask[:, :, queries, 9 + j * block : 9 + (j + 1) * block] = True
    context = drafter.context_kv(drafter.context_features(states), torch.arange(9)[None])
    together = drafter(embeddings, positions, context, [mask] * 2)

    for j, start in enumerate(starts):
        queries = slice(j * block, (j + 1) * block)
        alone = run_block(drafter, states[:, :start], embeddings[:, queries])
        torch.testing.assert_close(together[:, queries], alone, atol=1e-5, rtol=0)

    together.square().mul(torch.randn_like(together)).sum().backward()
    for name, parameter in drafter.named_parameters():
        # A key bias turns with the position, so it too has a gradient here.
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_one_context_and_one_mask_per_layer_are_required(make_drafter: Any) -> None:
    drafter = make_drafter()
    context = drafter.context_kv(torch.randn(1, 4, 32), torch.arange(4)[None])
    block, positions = torch.randn(1, 5, 32), torch.arange(4, 9)[None]
    with pytest.raises(ValueError, match="shorter"):
        drafter(block, positions, context, [None])
    with pytest.raises(ValueError, match="shorter"):
        drafter(block, positions, context[:1], [None, None])


def test_block_tokens_are_the_anchor_and_masks(make_drafter: Any) -> None:
    tokens = make_drafter().block_tokens(torch.tensor([7, 9]), 4)
    assert tokens.tolist() == [[7, 60, 60, 60], [9, 60, 60, 60]]


def test_embedding_is_the_targets_scaled_raw_row(make_drafter: Any) -> None:
    rows = torch.randn(61, 32)
    ids = torch.tensor([[3, 60]])
    assert torch.equal(make_drafter().embed(ids, rows), rows[ids])
    assert torch.equal(make_drafter(embedding_scale=2.0).embed(ids, rows), 2 * rows[ids])
    assert make_drafter().embed(ids, rows.half()).dtype == torch.float32


def test_own_embedding_wins_over_the_targets(make_drafter: Any) -> None:
    drafter = make_drafter(own_embedding=True)
    found = drafter.embed(torch.tensor([[3]]), torch.zeros(61, 32))
    assert torch.equal(found[0, 0], drafter.embed_tokens.weight[3])


def test_head_is_the_targets_unless_it_has_its_own(make_drafter: Any) -> None:
    hidden = torch.randn(1, 5, 32)
    head = nn.Linear(32, 61)
    assert torch.equal(make_drafter().logits(hidden, head), head(hidden))
    own = make_drafter(own_head=True, draft_vocab_size=40)
    assert torch.equal(own.logits(hidden, head), own.lm_head(hidden))


def test_softcap_bounds_and_multiplier_scales(make_drafter: Any) -> None:
    hidden = torch.randn(1, 5, 32) * 100
    head = nn.Linear(32, 61)
    capped = make_drafter(logit_softcap=3.0).logits(hidden, head)
    assert capped.abs().max() <= 3.0
    assert capped.abs().max() > 2.9
    halved = make_drafter(logit_multiplier=0.5).logits(hidden, head)
    assert torch.equal(halved, head(hidden) * 0.5)


def test_reduced_vocabulary_maps_by_offsets(make_drafter: Any) -> None:
    drafter = make_drafter(own_head=True, draft_vocab_size=3)
    drafter.d2t.copy_(torch.tensor([0, 4, 20]))
    assert drafter.to_target_ids(torch.tensor([[2, 1, 0, 2]])).tolist() == [[22, 5, 0, 22]]
    whole = torch.tensor([[2, 1]])
    assert torch.equal(make_drafter().to_target_ids(whole), whole)


def test_norm_of_large_bfloat16_values_is_exact_as_in_qwen3() -> None:
    reference = Qwen3RMSNorm(64, eps=1e-6).to(torch.bfloat16)
    nn.init.uniform_(reference.weight, 0.5, 1.5)
    norm = RMSNorm(64, 1e-6).to(torch.bfloat16)
    norm.load_state_dict(reference.state_dict())
    hidden = (1000 * torch.randn(3, 64)).to(torch.bfloat16)
    assert torch.equal(norm(hidden), reference(hidden))

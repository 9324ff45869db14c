"""The DFlash drafter: a few decoder layers that guess a whole block of tokens in one pass.

A target language model has just committed the tokens before position p and chosen the token at p,
the *anchor*. Instead of asking the target for p+1, p+2, ... one at a time, the drafter fills a
block of B slots at once, and the target then checks all of them in a single step:

    slot            0        1       2      ...    B-1
    holds         anchor   <mask>  <mask>   ...   <mask>
    at position     p       p+1     p+2     ...   p+B-1
    predicts        -      x[p+1]  x[p+2]   ...  x[p+B-1]

Slot k predicts the token at its *own* position, p+k. Slots see each other in both directions (in
most drafters), so this is denoising rather than next-token prediction.

A drafter this small is good enough because it reads the target's hidden states. The target has
already computed them for every committed token; the outputs of a few chosen layers (the taps)
are concatenated and turned into one *context feature* per token:

    feature = hidden_norm(fc(concat(tapped states)))

The anchor itself has no feature yet: the target has not processed it.

Each draft layer is an ordinary pre-norm decoder layer, except for its attention:

    queries           from the block only
    keys and values   from the context features, then from the block,
                      both through the same k_proj (and k_norm) and v_proj

The block passes the layer's input_layernorm before its projections; the context features do not,
and no layer updates them. So the keys and values of a committed token depend only on its feature;
they are computed once (`context_kv`) and cached for all later blocks.

The token embedding and the output head are the target's, cast to the drafter's precision, unless
the drafter has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from leadout.dflash.config import DrafterConfig
from leadout.dflash.rope import Rotation, rotate, rotation_at

INITIAL_STD = 0.02


class KeyValue(NamedTuple):
    """Keys and values of one layer; keys are already normalized and rotated."""

    keys: Tensor  # [batch, kv_heads, length, head_dim]
    values: Tensor  # [batch, kv_heads, length, head_dim]


class Attend(Protocol):
    """Attention of a block's queries [batch, heads, queries, head_dim] to context and block."""

    def __call__(self, queries: Tensor, context: KeyValue, own: KeyValue, mask: Any) -> Tensor:
        """[batch, heads, queries, head_dim]; the mask is whatever the implementation expects."""


def attend_to_all(queries: Tensor, context: KeyValue, own: KeyValue, mask: Tensor | None) -> Tensor:
    """Every query of a row attends to all keys of the row that the mask allows.

    The mask is boolean [batch, 1, queries, context + queries]; None allows all.
    """
    return F.scaled_dot_product_attention(
        queries,
        torch.cat([context.keys, own.keys], dim=2),
        torch.cat([context.values, own.values], dim=2),
        attn_mask=mask,
        scale=queries.shape[-1] ** -0.5,
        enable_gqa=queries.shape[1] != own.keys.shape[1],
    )


class Drafter(nn.Module):
    """A DFlash drafter; its parameters have the names of the published checkpoints."""

    d2t: Tensor | None  # draft id i is target id i + d2t[i]

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.context_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in config.layers)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.head_rows, bias=False) if config.own_head else None
        reduced = config.draft_vocab_size
        self.register_buffer(
            "d2t", None if reduced is None else torch.zeros(reduced, dtype=torch.int64)
        )
        # Gradient checkpointing: keep only the inputs of layers, and run them again backwards.
        self.recompute = False
        self._initialise()

    def context_features(self, states: Tensor) -> Tensor:
        """Tapped target states [batch, length, taps * target width] to features [batch, length, H].

        The taps are concatenated in the order of the configuration's layer ids.
        """
        features: Tensor = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        return features

    def context_kv(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Every layer's keys and values of committed tokens at positions [batch, length]."""
        rotation = self._rotation(positions)
        return [layer.key_value(features, rotation) for layer in self._layers()]

    def forward(
        self,
        block_embeddings: Tensor,
        positions: Tensor,
        context: Sequence[KeyValue],
        masks: Sequence[Any],
        attend: Attend = attend_to_all,
    ) -> Tensor:
        """Hidden states [batch, queries, H] of block slots, ready for `logits`.

        `block_embeddings` is [batch, queries, H] and `positions` [batch, queries]. `context` and
        `masks` hold one entry per layer; a mask is true where a query may attend and is passed to
        `attend` unchanged. Several blocks may share a row if the masks separate them.
        """
        rotation = self._rotation(positions)
        hidden = block_embeddings
        for layer, layer_context, mask in zip(self._layers(), context, masks, strict=True):
            inputs = (hidden, rotation, layer_context, mask, attend)
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                hidden = layer(*inputs)
        normed: Tensor = self.norm(hidden)
        return normed

    def block_tokens(self, anchor: Tensor, length: int) -> Tensor:
        """Anchors [batch] to blocks [batch, length]: the anchor, then the mask token."""
        masks = anchor.new_full((anchor.shape[0], length - 1), self.config.mask_token_id)
        return torch.cat([anchor[:, None], masks], dim=1)

    def embed(self, token_ids: Tensor, target_embedding: Tensor) -> Tensor:
        """Token ids to embeddings [..., H], from the target's rows [vocab, H] or the drafter's own.

        The rows are not scaled: a scale that the target itself applies is not part of DFlash.
        """
        own = self.embed_tokens
        rows = F.embedding(token_ids, target_embedding if own is None else own.weight)
        return rows.to(self.fc.weight.dtype) * self.config.embedding_scale

    def logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Hidden states [..., H] to scores over the draft vocabulary [..., head_rows]."""
        head = target_head if self.lm_head is None else self.lm_head
        scores: Tensor = head(hidden)
        return self.config.logit_scaling.apply(scores)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Indices into `logits` to target token ids."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def _rotation(self, positions: Tensor) -> Rotation:
        return rotation_at(self.config.rope, self.config.head_dim, positions)

    def _layers(self) -> Iterable[DraftLayer]:
        return cast(Iterable[DraftLayer], self.layers)

    def _initialise(self) -> None:
        if self.fc.weight.is_meta:  # built for names and shapes, or to be loaded from a file
            return
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)


class DraftLayer(nn.Module):
    """Attention over context and block, then a gated MLP, each added to the block's residual."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def key_value(self, features: Tensor, rotation: Rotation) -> KeyValue:
        """Keys and values of context features [batch, length, H]."""
        return self.self_attn.key_value(features, rotation)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        context: KeyValue,
        mask: Any,
        attend: Attend,
    ) -> Tensor:
        block = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(block, rotation, context, mask, attend)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class DraftAttention(nn.Module):
    """Grouped-query attention with normalized heads: queries from the block, keys from both."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def key_value(self, inputs: Tensor, rotation: Rotation) -> KeyValue:
        """Keys and values of context features or of normalized block states, [batch, length, H]."""
        keys = self.k_norm(self._split_heads(self.k_proj(inputs)))
        return KeyValue(rotate(keys, rotation), self._split_heads(self.v_proj(inputs)))

    def forward(
        self,
        block: Tensor,
        rotation: Rotation,
        context: KeyValue,
        mask: Any,
        attend: Attend,
    ) -> Tensor:
        queries = rotate(self.q_norm(self._split_heads(self.q_proj(block))), rotation)
        attended = attend(queries, context, self.key_value(block, rotation), mask)
        result: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return result

    def _split_heads(self, projected: Tensor) -> Tensor:
        batch, length, width = projected.shape
        heads = projected.view(batch, length, width // self.head_dim, self.head_dim)
        return heads.transpose(1, 2)  # [batch, heads, length, head_dim]


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 at any precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)

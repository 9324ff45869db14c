"""The sizes of a target and of a drafter for it, from config.json alone.

Counts of weights, and bytes per token, for any decoder that transformers or vLLM can run: grouped
and latent attention, dense layers and mixtures of experts. Nothing is loaded, so that the sizes of
a target that fits on no single device can be planned with too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leadout.pairing.target import decoder_section, read_any_config, target_from_config

# Published drafters have 8 KV heads of 128, whatever their target has.
MAX_KV_HEADS = 8
DRAFT_HEAD_DIM = 128
SMALL_HEAD_DIM = 64  # where the hidden size is below SMALL_HIDDEN
SMALL_HIDDEN = 1024
# Attention kernels of vLLM take multiples of 8 up to 256.
HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 16, 256
# The MLP of a drafter, in hidden sizes, where a mixture has no dense layer to take it from.
MLP_RATIO = 3
MIN_MLP_RATIO, MAX_MLP_RATIO = 1.5, 6
MLP_STEP = 64

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "experts_per_token", "moe_k", "num_experts_per_token")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_intermediate_size")
_SHARED_EXPERTS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values are compressed into one vector."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts."""

    count: int
    active: int
    width: int
    shared_width: int  # of the experts that see every token, together
    dense_layers: int  # layers with a plain MLP instead


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """The sizes of a decoder; layers of other kinds than attention are counted as attention."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int  # of a dense layer; of a mixture without one, what a dense layer would have
    tied: bool
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def parameters(self) -> int:
        """All weights, without norms and biases."""
        return self._count(whole=True)

    @property
    def active_parameters(self) -> int:
        """The weights that one token passes through, with the output head."""
        return self._count(whole=False)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the target's own KV cache holds for one token."""
        if self.latent is not None:
            return self.num_layers * (self.latent.kv_rank + self.latent.rope_dim)
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Embedding, output head and final norm: what training needs of the target."""
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size + self.hidden_size

    def _count(self, *, whole: bool) -> int:
        experts, layers = self.experts, self.num_layers
        dense = layers if experts is None else experts.dense_layers
        total = layers * self._attention() + dense * 3 * self.hidden_size * self.mlp_width
        if experts is not None:
            used = experts.count if whole else experts.active
            widths = used * experts.width + experts.shared_width
            per_layer = self.hidden_size * (3 * widths + experts.count)  # with the router
            total += (layers - dense) * per_layer
        head = self.vocab_size * self.hidden_size
        return total + (self.embedding_parameters if whole else head)

    def _attention(self) -> int:
        hidden, heads, latent = self.hidden_size, self.num_heads, self.latent
        if latent is None:
            return 2 * hidden * self.head_dim * (heads + self.num_kv_heads)
        queries = heads * (latent.nope_dim + latent.rope_dim)
        rank = latent.q_rank
        return (
            (hidden * queries if rank is None else rank * (hidden + queries))
            + hidden * (latent.kv_rank + latent.rope_dim)
            + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
            + heads * latent.value_dim * hidden
        )


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of a drafter that do not depend on its number of layers."""

    hidden_size: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def parameters(self, layers: int, taps: int) -> int:
        """The trained weights, norms included."""
        hidden, dim = self.hidden_size, self.head_dim
        attention = 2 * hidden * dim * (self.num_heads + self.num_kv_heads) + 2 * dim
        layer = attention + 3 * hidden * self.mlp_width + 2 * hidden
        return layers * layer + taps * hidden * hidden + 2 * hidden

    def kv_bytes_per_token(self, layers: int, bytes_per_value: int = 2) -> int:
        """What a server's KV cache holds for the drafter."""
        return layers * 2 * self.num_kv_heads * self.head_dim * bytes_per_value


def read_sizes(folder: Path) -> TargetSizes:
    return sizes_from_config(read_any_config(folder), str(folder))


def sizes_from_config(config: Mapping[str, object], name: str) -> TargetSizes:
    """From the fields of a config.json; a missing number of heads counts as heads of 64 or 128."""
    facts = target_from_config(config, name)
    section, _ = decoder_section(config)
    hidden = facts.hidden_size
    heads = _count_of(section, "num_attention_heads") or max(1, hidden // _usual_head_dim(hidden))
    experts = _experts(section, facts.num_layers)
    tied = section.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is None:  # files of Gemma models omit it, as it is the default of their class
        tied = str(section.get("model_type", "")).startswith("gemma")
    return TargetSizes(
        hidden_size=hidden,
        num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        num_heads=heads,
        num_kv_heads=_count_of(section, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=_count_of(section, "head_dim") or max(1, hidden // heads),
        mlp_width=_dense_width(section, hidden, experts),
        tied=tied is True,
        latent=_latent(section),
        experts=experts,
    )


def shape_for(target: TargetSizes, mlp_width: int | None = None) -> DraftShape:
    """The drafter's sizes: the target's own, where they suit a small dense decoder.

    A drafter's context is held in the server's KV cache for every token, so it gets grouped
    attention with few KV heads even where the target compresses its cache or has none grouped.
    """
    hidden, dim, heads = target.hidden_size, target.head_dim, target.num_heads
    usable = dim % HEAD_DIM_STEP == 0 and MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM
    if target.latent is not None or not usable:
        dim = _usual_head_dim(hidden)
        # A power of two divides over any usual number of GPUs.
        heads = min(_power_of_two_from(-(-hidden // dim)), _power_of_two_from(heads))
    wanted = MAX_KV_HEADS if target.latent is not None else min(target.num_kv_heads, MAX_KV_HEADS)
    kv_heads = max(count for count in range(1, wanted + 1) if heads % count == 0)
    return DraftShape(hidden, mlp_width or target.mlp_width, heads, kv_heads, dim)


def _usual_head_dim(hidden: int) -> int:
    return SMALL_HEAD_DIM if hidden < SMALL_HIDDEN else DRAFT_HEAD_DIM


def _power_of_two_from(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _experts(section: Mapping[str, object], layers: int) -> Experts | None:
    count = _count_of(section, *_EXPERTS)
    if count is None or count < 2:
        return None
    width = _count_of(section, *_EXPERT_WIDTHS, "intermediate_size") or 1
    shared = _count_of(section, "shared_expert_intermediate_size", "shared_intermediate_size") or 0
    if not shared:
        shared = (_count_of(section, *_SHARED_EXPERTS) or 0) * width
    listed = section.get("mlp_only_layers")
    first = _count_of(section, "first_k_dense_replace") or 0
    dense = first or (len(listed) if isinstance(listed, list) else 0)
    return Experts(
        count=count,
        active=_count_of(section, *_ACTIVE_EXPERTS) or 1,
        width=width,
        shared_width=shared,
        dense_layers=min(dense, layers),
    )


def _dense_width(section: Mapping[str, object], hidden: int, experts: Experts | None) -> int:
    """The width of a dense MLP; of a mixture, of its dense layers or what they would have."""
    width = _count_of(section, "intermediate_size", "ffn_hidden_size", "n_inner")
    if experts is None and width is not None:
        return width
    # Where experts have their own field, the other one is that of dense layers.
    separate = _count_of(section, *_EXPERT_WIDTHS) is not None
    if separate and width and MIN_MLP_RATIO <= width / hidden <= MAX_MLP_RATIO:
        return width
    return -(-MLP_RATIO * hidden // MLP_STEP) * MLP_STEP


def _latent(section: Mapping[str, object]) -> Latent | None:
    kv_rank = _count_of(section, "kv_lora_rank")
    if kv_rank is None:
        return None
    return Latent(
        kv_rank=kv_rank,
        q_rank=_count_of(section, "q_lora_rank"),
        nope_dim=_count_of(section, "qk_nope_head_dim") or DRAFT_HEAD_DIM,
        rope_dim=_count_of(section, "qk_rope_head_dim") or SMALL_HEAD_DIM,
        value_dim=_count_of(section, "v_head_dim") or DRAFT_HEAD_DIM,
    )


def _count_of(section: Mapping[str, object], *names: str) -> int | None:
    """The first of these fields that is a positive whole number."""
    for name in names:
        value = section.get(name)
        if type(value) is int and value > 0:  # True is an int, but not a count
            return value
    return None

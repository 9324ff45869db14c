"""The configuration of a DFlash drafter: sizes, attention, and its connection to the target.

Layer ids follow the z-lab convention everywhere inside Leadout: id ``i`` means the *output* of
target layer ``i``. Files that count differently are converted where they are read and written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leadout.errors import LeadoutError

if TYPE_CHECKING:
    from torch import Tensor


class InvalidDrafterError(LeadoutError):
    """An invalid drafter config: names the field, its value and what was expected."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} is {value!r}; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of one draft layer.

    With ``window`` W a query at position p sees keys at positions p-W+1 .. p (and, when the layer
    is bidirectional, up to p+W-1); ``None`` is full attention. ``causal`` hides later block slots
    from earlier ones; DFlash drafters are trained bidirectional, except for sliding layers.
    """

    window: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InvalidDrafterError("sliding_window", self.window, "at least 1, or none")


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN context extension; ``attention_factor`` None: derived from the others."""

    factor: float
    original_max_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The frequency-dependent scaling of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a constant."""

    factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, half-split layout; ``fraction`` is the rotated share of a head."""

    theta: float
    scaling: Yarn | Llama3Scaling | LinearScaling | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.theta) and self.theta > 1.0):
            raise InvalidDrafterError("rope_theta", self.theta, "a number above 1")
        if not 0.0 < self.fraction <= 1.0:
            raise InvalidDrafterError("partial_rotary_factor", self.fraction, "in (0, 1]")
        if self.scaling is not None and not self.scaling.factor >= 1.0:
            raise InvalidDrafterError("rope factor", self.scaling.factor, "at least 1")
        if isinstance(self.scaling, Yarn | Llama3Scaling):
            _require_positive(
                "original_max_position_embeddings", self.scaling.original_max_positions
            )


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """What a model does to the scores of its output head; the defaults do nothing."""

    multiplier: float = 1.0
    softcap: float | None = None  # C: scores become C * tanh(score / C)

    def apply(self, scores: Tensor) -> Tensor:
        """Scores of the head to logits, of any shape."""
        if self.multiplier != 1.0:
            scores = scores * self.multiplier
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        return scores


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Everything that determines a drafter's computation, independent of any file format."""

    # The decoder.
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerAttention, ...]
    rope: Rope
    max_positions: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False

    # The connection to the target.
    target_layer_ids: tuple[int, ...] = ()  # the tapped layers, in the order of fc's input
    target_hidden_size: int | None = None  # None: the same as hidden_size
    target_num_layers: int | None = None  # None: not stated in the checkpoint
    vocab_size: int = 0  # rows of the target's embedding
    mask_token_id: int = 0  # fills the block's slots 1..B-1
    block_size: int = 0  # B: the anchor and B-1 masks

    # Tensors of the drafter's own; otherwise it uses the target's.
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None  # None: the full vocabulary; requires own_head

    # Rarely used scalings; the defaults have no effect.
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "max_positions", "vocab_size", "rms_norm_eps", "embedding_scale", "logit_multiplier",
        ):  # fmt: skip
            _require_positive(name, getattr(self, name))
        self._require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"a divisor of num_heads ({self.num_heads})",
        )
        self._require(len(self.layers) > 0, "layers", "at least one draft layer")
        self._require(self.head_dim % 2 == 0, "head_dim", "even, for rotary embedding")
        rotated = int(self.head_dim * self.rope.fraction)
        if rotated % 2 or rotated < 2:
            raise InvalidDrafterError(
                "partial_rotary_factor",
                self.rope.fraction,
                f"a share of head_dim ({self.head_dim}) that is an even number of dimensions",
            )
        self._require(self.block_size >= 2, "block_size", "at least 2, for the anchor and one mask")
        self._require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            f"a row of the target's embedding, 0 to {self.vocab_size - 1}",
        )
        self._require_layer_ids()
        if self.target_hidden_size is not None:
            _require_positive("target_hidden_size", self.target_hidden_size)
        if self.logit_softcap is not None:
            _require_positive("logit_softcap", self.logit_softcap)
        if self.draft_vocab_size is not None:
            self._require(
                0 < self.draft_vocab_size < self.vocab_size,
                "draft_vocab_size",
                f"less than vocab_size ({self.vocab_size}), or none for the full vocabulary",
            )
            self._require(self.own_head, "own_head", "true with a reduced draft vocabulary")
        if self.context_size != self.hidden_size:
            # The target's embedding and head do not fit a drafter with another hidden size.
            for name in ("own_embedding", "own_head"):
                expected = "true, since the hidden sizes of target and drafter differ"
                self._require(getattr(self, name), name, expected)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def context_size(self) -> int:
        """Size of one tapped hidden state."""
        return self.target_hidden_size or self.hidden_size

    @property
    def max_draft_tokens(self) -> int:
        """The largest K the block was trained for."""
        return self.block_size - 1

    @property
    def head_rows(self) -> int:
        """Rows of the output head: the draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def logit_scaling(self) -> LogitScaling:
        return LogitScaling(self.logit_multiplier, self.logit_softcap)

    def _require_layer_ids(self) -> None:
        ids = self.target_layer_ids
        self._require(len(ids) > 0, "target_layer_ids", "at least one layer of the target")
        self._require(len(set(ids)) == len(ids), "target_layer_ids", "no layer twice")
        self._require(min(ids) >= 0, "target_layer_ids", "no negative layer")
        if self.target_num_layers is not None:
            self._require(
                max(ids) < self.target_num_layers,
                "target_layer_ids",
                f"layers of the target, 0 to {self.target_num_layers - 1}",
            )

    def _require(self, holds: bool, field: str, expected: str) -> None:
        if not holds:
            raise InvalidDrafterError(field, getattr(self, field), expected)


def _require_positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidDrafterError(field, value, "a positive number")

"""What the pairing rules compare: a target, a drafter, and the settings of their server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leadout.checkpoints import Checkpoint
from leadout.dflash.config import Rope
from leadout.findings import Severity


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The properties of a target that matter to a drafter."""

    name: str  # a hub name or a folder, as the user gave it
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of its embedding, padding included
    rope: Rope | None  # None: not stated, or of a type that a drafter cannot have
    max_positions: int | None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings with which the engine will start."""

    draft_tokens: int  # K
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str  # float32, bfloat16 or float16, for target and drafter
    model_runner: Literal["V1", "V2"]
    backend_name: str | None  # the attention backend that runs the drafter
    backend_takes_non_causal: bool | None  # None: unknown
    served_causal: tuple[bool, ...] | None  # causality of each draft layer as served; None: unknown


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter; without settings only their files are compared."""

    target: TargetFacts
    drafter: Checkpoint
    settings: EngineSettings | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a target, a drafter and the settings of their server."""

    name: str
    severity: Severity
    compares: str
    remedy: str
    broken: Callable[[Pair], str | None]  # what is wrong; None: the rule holds

"""What the rules look at: a target, a drafter, and what a server is going to do with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leadout.checkpoints import Checkpoint
from leadout.dflash.config import Rope
from leadout.findings import Severity


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target, as far as a drafter is concerned."""

    name: str  # a hub name or a folder, as the user gave it
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of its embedding, padding included
    rope: Rope | None  # None: not stated, or of a kind that a drafter cannot have
    max_positions: int | None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine has decided before it starts."""

    draft_tokens: int  # K
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str  # float32, bfloat16 or float16: target and drafter run in the same one
    model_runner: Literal["V1", "V2"]
    backend_name: str | None  # the attention backend that runs the drafter
    backend_takes_non_causal: bool | None  # None: it could not be asked
    served_causal: tuple[bool, ...] | None  # what each draft layer will do; None: unknown


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter; without settings only their files are examined."""

    target: TargetFacts
    drafter: Checkpoint
    settings: EngineSettings | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold between a target, a drafter and a server's settings."""

    name: str
    severity: Severity
    compares: str
    remedy: str
    broken: Callable[[Pair], str | None]  # what was found and what was wanted; None: it holds

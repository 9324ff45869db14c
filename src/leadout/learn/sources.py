"""Where a cycle's text and the target's states of it come from: captured files, or memory.

Training and gate are the same for both. A `CycleText` hands out the samples, and a source of
states where the target is not run for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from leadout.evaluate.hidden_states import StateSource
from leadout.evaluate.ranks import Ranks
from leadout.learn import data
from leadout.learn.data import Mix
from leadout.shards import Sample
from leadout.train.config import TrainConfig
from leadout.train.run import Corpus
from leadout.train.states_source import served_states

LOSSLESS_LEFT_OUT = (
    "because the learner has no target to run: the candidate has the shape of the serving drafter, "
    "and vLLM verifies every draft"
)


class CycleText(Protocol):
    """The text of one cycle."""

    def corpus(self, max_length: int) -> Corpus:
        """What to train on, cut to this length."""

    def held_out(self) -> list[Sample]:
        """The newest requests, for the gate."""

    def base(self) -> list[Sample]:
        """Original data, for the gate."""

    def states(
        self, settings: TrainConfig, longest: int, ranks: Ranks
    ) -> AbstractContextManager[StateSource | None]:
        """The source for training; None: the run computes them itself."""

    @property
    def known_states(self) -> StateSource | None:
        """The states of all this text; None: the gate runs the target."""


@dataclass(frozen=True, slots=True)
class CapturedText:
    """A mix of captured traffic in files; the target is run for its states."""

    mix: Path
    target: Path
    layer_ids: Sequence[int]
    vocab_size: int
    replay_share: float
    states_from: tuple[str, ...] = ()
    vllm_flags: tuple[str, ...] = ()

    def corpus(self, max_length: int) -> Corpus:
        return data.read_training(self.mix, max_length, self.replay_share, self.vocab_size)

    def held_out(self) -> list[Sample]:
        return data.read_part(self.mix, data.HELD_OUT)

    def base(self) -> list[Sample]:
        return data.read_part(self.mix, data.BASE)

    def states(
        self, settings: TrainConfig, longest: int, ranks: Ranks
    ) -> AbstractContextManager[StateSource | None]:
        where = settings.model_copy(update={"states_from": self.states_from})
        return served_states(self.target, self.layer_ids, where, longest, ranks, self.vllm_flags)

    @property
    def known_states(self) -> StateSource | None:
        return None


@dataclass(frozen=True, slots=True)
class ServedText:
    """A mix of served sequences in memory, with the states that came with them."""

    mix: Mix
    source: StateSource
    vocab_size: int
    replay_share: float

    def corpus(self, max_length: int) -> Corpus:
        return data.training_in_memory(self.mix, max_length, self.replay_share, self.vocab_size)

    def held_out(self) -> list[Sample]:
        return self.mix.held_out

    def base(self) -> list[Sample]:
        return self.mix.base

    def states(
        self, settings: TrainConfig, longest: int, ranks: Ranks
    ) -> AbstractContextManager[StateSource | None]:
        return nullcontext(self.source)

    @property
    def known_states(self) -> StateSource | None:
        return self.source

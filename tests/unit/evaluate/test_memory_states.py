"""States from memory give the same drafts as computed ones, without what no block sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leadout.dflash.config import DrafterConfig
from leadout.dflash.target import Observation
from leadout.evaluate.blocks import BlockForward, TrainingSequence, possible_anchors
from leadout.evaluate.hidden_states import Indexed
from leadout.evaluate.memory_states import KeptStates, StatesInMemory, first_position_needed
from support.drafters import FULL, MINI, SLIDING, random_drafter

LENGTH, PROMPT = 40, 20
WINDOW = 6  # of SLIDING


class ComputedElsewhere:
    """States of all positions."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self._states = states
        self.asked: list[str] = []

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        self.asked += [sequence.name for _, sequence in sequences]
        found = [self._states[sequence.name] for _, sequence in sequences]
        states = pad_sequence(found, batch_first=True)
        return Observation(states, states[..., : MINI.context_size])


def sequence(name: str, length: int) -> Indexed:
    tokens = torch.arange(length) % MINI.vocab_size
    return 0, TrainingSequence(name, "traffic", tokens, PROMPT)


def states_of(length: int, seed: int) -> Tensor:
    width = len(MINI.target_layer_ids) * MINI.context_size
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def drafted(config: DrafterConfig, states: Tensor) -> Tensor:
    """What a drafter computes at every anchor of the answer."""
    forward = BlockForward(random_drafter(config), torch.randn(config.vocab_size, 16))
    anchors = possible_anchors(PROMPT, LENGTH)[None]
    hidden: Tensor = forward(states, anchors, anchors % config.vocab_size)
    return hidden


@pytest.mark.parametrize(
    ("layers", "needed"),
    [((SLIDING, SLIDING), PROMPT - WINDOW + 1), ((SLIDING, FULL), 0), ((FULL,), 0)],
)
def test_no_block_sees_what_is_missing(layers: tuple[object, ...], needed: int) -> None:
    """Neither the last state nor those before the window; one more would be seen."""
    config = replace(MINI, layers=layers)
    assert first_position_needed(config, PROMPT) == needed
    whole = states_of(LENGTH, seed=1)
    torch.manual_seed(2)
    expected = drafted(config, whole[None])
    for first, is_equal in ((needed, True), (needed + 1, False)):
        kept = {"a": KeptStates(first, whole[first:-1])}
        source = StatesInMemory(
            kept, ComputedElsewhere({}), hidden_size=MINI.context_size, dtype=torch.float32
        )
        observed = source.observe([sequence("a", LENGTH)])
        assert observed.states.shape == (1, LENGTH, whole.shape[-1])
        torch.manual_seed(2)
        assert torch.equal(drafted(config, observed.states), expected) is is_equal


def test_other_sequences_come_from_the_other_source() -> None:
    long, short = states_of(LENGTH, seed=1), states_of(30, seed=2)
    others = ComputedElsewhere({"short": short})
    source = StatesInMemory(
        {"long": KeptStates(0, long[:-1].bfloat16())},
        others,
        hidden_size=MINI.context_size,
        dtype=torch.float32,
    )
    both = [sequence("short", 25), sequence("long", LENGTH)]  # one of them is cut
    observed = source.observe(both)
    assert others.asked == ["short"]
    assert torch.equal(observed.states[0, :25], short[:25])
    assert not observed.states[0, 25:].any()
    assert torch.equal(observed.states[1, :-1], long[:-1].bfloat16().float())
    assert observed.final.shape == (2, LENGTH, MINI.context_size)
    assert source.can_read([both[1]])
    assert not source.can_read(both)  # the other source computes

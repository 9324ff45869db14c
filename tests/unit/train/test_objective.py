"""The chunked loss equals the eager one and the formula, and never holds all logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leadout.dflash.config import LogitScaling
from leadout.evaluate import target_weights
from leadout.train.config import TrainConfig
from leadout.train.objective import Head, Slots, loss_of_slots, position_weights

WIDTH, VOCAB = 12, 37
DPACE = TrainConfig(distillation=0.0, position_weights="dpace", dpace_alpha=0.5)
EXPONENTIAL = TrainConfig(distillation=0.0, position_weights="exponential", gamma=4)
MIXED = TrainConfig(distillation=0.3, position_weights="dpace", dpace_alpha=0.4)
SCALINGS = (LogitScaling(), LogitScaling(0.3), LogitScaling(0.5, softcap=2.0))
DISTILLED = TrainConfig(distillation=1.0, position_weights="exponential", gamma=7)


def some_slots(blocks: int, per_block: int, vocab: int = VOCAB) -> tuple[Tensor, Slots]:
    generator = torch.Generator().manual_seed(blocks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ends = torch.randint(1, per_block + 1, (blocks, 1), generator=generator)
    first = torch.randint(2 * blocks, (blocks, 1), generator=generator)  # blocks overlap
    slots = Slots(
        torch.randint(vocab, (blocks, per_block), generator=generator),
        torch.arange(per_block) < ends,
        normal(2 * blocks + per_block, WIDTH),
        first + torch.arange(per_block),
    )
    return normal(blocks, per_block, WIDTH).requires_grad_(), slots


def some_head(vocab: int = VOCAB) -> Head:
    torch.manual_seed(3)
    return Head(torch.randn(vocab, WIDTH))


def hold_at_once(slots: int, monkeypatch: pytest.MonkeyPatch, vocab: int = VOCAB) -> None:
    """Let the loss hold the logits of this many slots."""
    monkeypatch.setitem(target_weights.LOGIT_BYTES, "cpu", 4 * vocab * slots)


def eager_loss_of_slots(
    hidden: Tensor, slots: Slots, head: Head, config: TrainConfig, denominator: float
) -> tuple[Tensor, Tensor]:
    """The reference: all logits at once, gradients by autograd."""
    assert slots.teacher is not None
    logits = head.draft.apply(F.linear(hidden, head.rows))
    taught = head.target.apply(F.linear(slots.teacher[slots.teacher_at], head.rows))
    share = config.distillation
    mixture = (1 - share) * F.one_hot(slots.labels, logits.shape[-1]).float()
    mixture = mixture + share * torch.softmax(taught, dim=-1)
    log_probs = F.log_softmax(logits, dim=-1)
    at_label = log_probs.gather(-1, slots.labels[..., None])[..., 0]
    weights = position_weights(-at_label, slots.counted, config)
    hits = (logits.argmax(-1) == slots.labels) & slots.counted
    return (-(mixture * log_probs).sum(-1) * weights).sum() / denominator, hits


@pytest.mark.parametrize(
    "config",
    [DPACE, EXPONENTIAL, MIXED, DISTILLED],
    ids=["dpace", "exponential", "mixed", "distilled"],
)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (20, 7)], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_chunked_and_eager_loss_and_gradient_are_equal(
    monkeypatch: pytest.MonkeyPatch,
    config: TrainConfig,
    shape: tuple[int, int],
    scaling: LogitScaling,
) -> None:
    hold_at_once(9, monkeypatch)  # less than most batches, and no divisor
    hidden, slots = some_slots(*shape)
    head = some_head()._replace(target=scaling, draft=scaling)
    found, hits = loss_of_slots(hidden, slots, head, config, 5.0)
    expected, expected_hits = eager_loss_of_slots(hidden, slots, head, config, 5.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(hits, expected_hits)
    gradients = (torch.autograd.grad(3 * loss, hidden) for loss in (found, expected))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_the_eager_loss_follows_the_formula() -> None:
    hidden, slots = some_slots(6, 4)
    head = some_head()
    found, _ = eager_loss_of_slots(hidden, slots, head, MIXED, 10.0)
    hidden = hidden.detach()
    total = 0.0
    for block in range(6):
        probs = [torch.softmax(head.rows @ hidden[block, k], 0) for k in range(4)]
        entropy = [-math.log(probs[k][slots.labels[block, k]]) for k in range(4)]
        weights = slow_dpace(entropy, slots.counted[block].tolist(), 0.4)
        for k in range(4):
            assert slots.teacher is not None
            state = slots.teacher[slots.teacher_at[block, k]]
            teacher = torch.softmax(head.rows @ state, 0)
            expected = 0.3 * teacher
            expected[slots.labels[block, k]] += 0.7
            total += weights[k] * -(expected * probs[k].log()).sum().item()
    assert found.item() == pytest.approx(total / 10.0, rel=1e-5)


def slow_dpace(entropy: list[float], counted: list[bool], alpha: float) -> list[float]:
    """w_j = sum over counted m >= j of the product of s_i, i <= m; s = (1 - alpha) q + alpha."""
    accepted = [
        (1 - alpha) * math.exp(-each) + alpha if known else 1.0
        for each, known in zip(entropy, counted, strict=True)
    ]
    places = range(len(accepted))
    return [
        sum(math.prod(accepted[: m + 1]) for m in places if m >= j and counted[m]) if known else 0.0
        for j, known in enumerate(counted)
    ]


def test_position_weights_by_hand() -> None:
    entropy = torch.tensor([[0.1, 2.0, 0.7, 1.3], [3.0, 0.2, 0.4, 0.9]])
    counted = torch.tensor([[True, True, True, True], [True, True, False, False]])
    found = position_weights(entropy, counted, DPACE)
    expected = [slow_dpace(entropy[row].tolist(), counted[row].tolist(), 0.5) for row in range(2)]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert (found[:, :-1] >= found[:, 1:]).all()
    decayed = position_weights(entropy, counted, EXPONENTIAL)
    expected = [[math.exp(-(k - 1) / 4) for k in (1, 2, 3, 4)]] * 2
    torch.testing.assert_close(decayed, torch.tensor(expected) * counted)


def test_position_weights_carry_no_gradient() -> None:
    hidden, slots = some_slots(4, 3)
    entropy = (hidden**2).sum(-1)
    assert not position_weights(entropy, slots.counted, DPACE).requires_grad


def test_only_counted_slots_have_a_gradient() -> None:
    hidden, slots = some_slots(9, 4)
    loss, hits = loss_of_slots(hidden, slots, some_head(), MIXED, 1.0)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(gradient.abs().sum(-1) > 0, slots.counted)
    assert not (hits & ~slots.counted).any()


def test_the_loss_is_a_plain_sum_over_blocks() -> None:
    hidden, slots = some_slots(10, 4)
    head = some_head()

    def part(chosen: slice) -> Tensor:
        labels, counted, teacher, at = slots
        own = Slots(labels[chosen], counted[chosen], teacher, at[chosen])
        return loss_of_slots(hidden[chosen], own, head, MIXED, 40.0)[0]

    whole = part(slice(0, 10))
    torch.testing.assert_close(part(slice(0, 3)) + part(slice(3, 10)), whole)


def test_distillation_requires_the_targets_states() -> None:
    hidden, slots = some_slots(2, 2)
    with pytest.raises(ValueError, match=r"distillation 0\.3 requires"):
        loss_of_slots(hidden, slots._replace(teacher=None), some_head(), MIXED, 1.0)


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that an operation yields, in backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_no_tensor_grows_with_vocabulary_times_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, vocab = 16, 2000
    hold_at_once(chunk, monkeypatch, vocab)
    head = some_head(vocab)

    def largest(of: Callable[..., tuple[Tensor, Tensor]], blocks: int) -> int:
        hidden, slots = some_slots(blocks, 4, vocab)
        with LargestTensor() as seen:
            of(hidden, slots, head, MIXED, 1.0)[0].backward()  # type: ignore[no-untyped-call]
        return seen.elements

    assert largest(loss_of_slots, 200) == largest(loss_of_slots, 50) == chunk * vocab
    assert largest(eager_loss_of_slots, 50) == 50 * 4 * vocab  # the measure does see it


class ScoredRows(TorchDispatchMode):
    """Counts for how many states logits are computed."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self._vocab = vocab
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape[-1] == self._vocab:
            self.count += len(result)
        return result


def test_the_teacher_is_computed_once_for_each_position() -> None:
    hidden, slots = some_slots(40, 6)
    with ScoredRows(VOCAB) as scored:
        loss_of_slots(hidden, slots, some_head(), MIXED, 1.0)
    positions = slots.teacher_at[slots.counted]
    assert scored.count == len(positions) + len(positions.unique())
    assert len(positions.unique()) < 0.7 * len(positions)


def test_chunks_are_counted_in_bytes() -> None:
    small, large = (
        target_weights.slots_per_chunk(torch.empty(vocab, 1)) for vocab in (49_152, 151_936)
    )
    assert small * 49_152 == pytest.approx(large * 151_936, rel=0.02)
    assert target_weights.slots_per_chunk(torch.empty(10**9, 1, device="meta")) == 1

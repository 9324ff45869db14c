"""The context cache gives the same blocks as recomputing the committed context each time."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadout.dflash.cache import ContextCache
from leadout.dflash.config import LayerAttention
from leadout.dflash.drafter import Drafter
from leadout.dflash.mask import decode_masks

CPU = torch.device("cpu")
TAPS = 96
LAYERS = (LayerAttention(window=6, causal=True), LayerAttention(window=4), LayerAttention())


@pytest.fixture
def drafter(make_drafter: Any) -> Drafter:
    return make_drafter(layers=LAYERS)


def new_cache(drafter: Drafter, batch: int) -> ContextCache:
    return ContextCache(drafter.config, batch, CPU, torch.float32)


@torch.no_grad()
def block_output(drafter: Drafter, cache: ContextCache, embeddings: Tensor) -> Tensor:
    view = cache.view()
    positions = cache.lengths[:, None] + torch.arange(embeddings.shape[1])
    masks = decode_masks(LAYERS, positions, view.positions, view.valid)
    return drafter(embeddings, positions, view.layers, masks)


@torch.no_grad()
def from_scratch(drafter: Drafter, history: Tensor, embeddings: Tensor) -> Tensor:
    """One row alone, its context computed anew from the states it committed, [length, taps]."""
    length = len(history)
    positions = torch.arange(length + len(embeddings))[None]
    context = drafter.context_kv(drafter.context_features(history[None]), positions[:, :length])
    valid = torch.ones(1, length, dtype=torch.bool)
    masks = decode_masks(LAYERS, positions[:, length:], positions[:, :length], valid)
    return drafter(embeddings[None], positions[:, length:], context, masks)[0]


@dataclass(frozen=True)
class Append:
    counts: list[int]
    rejected: int  # further states per row that are never committed


@dataclass(frozen=True)
class Keep:
    order: list[int]


BATCH = 3
COUNTS = st.lists(st.integers(0, 7), min_size=BATCH, max_size=BATCH)
STEPS = st.lists(
    st.builds(Append, COUNTS, st.integers(0, 3))
    | st.builds(Keep, st.lists(st.integers(0, BATCH - 1), min_size=1, max_size=BATCH, unique=True)),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS, seed=st.integers(0, 2**16))
def test_any_history_equals_recomputation(drafter: Drafter, steps: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = new_cache(drafter, BATCH)
    histories = [torch.empty(0, TAPS) for _ in range(BATCH)]
    for step in steps:
        rows = len(histories)
        match step:
            case Append(counts, rejected):
                counts = counts[:rows]
                states = torch.randn(rows, max(counts) + rejected, TAPS, generator=generator)
                for row, count in enumerate(counts):
                    histories[row] = torch.cat([histories[row], states[row, :count]])
                    states[row, count:] = torch.nan  # what is rejected must not matter at all
                cache.append(drafter, states, torch.tensor(counts))
            case Keep(order):
                order = [row for row in order if row < rows] or [0]
                histories = [histories[row] for row in order]
                cache.keep_rows(torch.tensor(order))
        assert cache.lengths.tolist() == [len(history) for history in histories]
        embeddings = torch.randn(len(histories), 5, 32, generator=generator)
        found = block_output(drafter, cache, embeddings)
        for row, history in enumerate(histories):
            expected = from_scratch(drafter, history, embeddings[row])
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)


def test_rejected_and_missing_tokens_are_zero_not_merely_masked(drafter: Drafter) -> None:
    cache = new_cache(drafter, 2)
    poisoned = torch.randn(2, 6, TAPS)
    poisoned[0, 4:] = poisoned[1, 1:] = torch.nan
    cache.append(drafter, poisoned, torch.tensor([4, 1]))
    cache.append(drafter, torch.randn(2, 1, TAPS), torch.tensor([1, 0]))
    view = cache.view()
    assert view.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert view.valid.tolist() == [[True] * 5, [True] + [False] * 4]
    for kv in view.layers:
        for part in kv:
            assert part.isfinite().all()
            assert (part[1, :, 1:] == 0).all()
            assert (part[1, :, :1] != 0).any()
    assert block_output(drafter, cache, torch.randn(2, 5, 32)).isfinite().all()


def test_stored_entries_are_never_touched_again(drafter: Drafter) -> None:
    cache = new_cache(drafter, 1)
    cache.append(drafter, torch.randn(1, 5, TAPS), torch.tensor([5]))
    before = [part.clone() for kv in cache.view().layers for part in kv]
    with torch.no_grad():  # if anything were recomputed, other weights would show
        for parameter in drafter.parameters():
            parameter.mul_(1.5)
    for _ in range(4):
        cache.append(drafter, torch.randn(1, 5, TAPS), torch.tensor([3]))
    after = [part[:, :, :5] for kv in cache.view().layers for part in kv]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_storage_grows_geometrically(drafter: Drafter) -> None:
    cache = new_cache(drafter, 1)
    copies = 0
    storage = None
    for _ in range(100):
        cache.append(drafter, torch.randn(1, 2, TAPS), torch.tensor([1]))
        if cache.view().layers[0].keys.data_ptr() != storage:
            storage = cache.view().layers[0].keys.data_ptr()
            copies += 1
    assert copies <= 8  # capacities 1, 2, 4, ..., 128


def test_appending_leaves_no_graph(drafter: Drafter) -> None:
    cache = new_cache(drafter, 1)
    cache.append(drafter, torch.randn(1, 2, TAPS), torch.tensor([2]))
    assert not cache.view().layers[0].keys.requires_grad


def test_first_block_may_have_no_context(drafter: Drafter) -> None:
    found = block_output(drafter, new_cache(drafter, 2), torch.randn(2, 5, 32))
    assert found.isfinite().all()


@pytest.mark.parametrize("counts", [[3, 1], [-1, 1]])
def test_committing_more_than_was_given_is_refused(drafter: Drafter, counts: list[int]) -> None:
    cache = new_cache(drafter, 2)
    with pytest.raises(ValueError, match=r"counts.*expected each between 0 and 2"):
        cache.append(drafter, torch.randn(2, 2, TAPS), torch.tensor(counts))
    assert cache.lengths.tolist() == [0, 0]

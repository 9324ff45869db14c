"""Visibility at decode time, against the definition written out pair by pair."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadout.dflash.config import LayerAttention
from leadout.dflash.mask import decode_mask, decode_masks

LAYERS = st.builds(LayerAttention, window=st.none() | st.integers(1, 12), causal=st.booleans())


def may_look(layer: LayerAttention, query: int, key: int) -> bool:
    if layer.causal and key > query:
        return False
    if layer.window is None:
        return True
    earliest = query - layer.window + 1
    latest = query if layer.causal else query + layer.window - 1
    return earliest <= key <= latest


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layer=LAYERS,
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=4),
    block=st.integers(1, 6),
)
def test_mask_is_the_definition(layer: LayerAttention, lengths: list[int], block: int) -> None:
    longest = max(lengths)
    context = torch.arange(longest).expand(len(lengths), -1)
    valid = context < torch.tensor(lengths)[:, None]
    positions = torch.tensor(lengths)[:, None] + torch.arange(block)
    [mask] = decode_masks([layer], positions, context, valid)

    expected = torch.zeros(len(lengths), 1, block, longest + block, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for slot in range(block):
            for key in range(length):
                expected[row, 0, slot, key] = may_look(layer, length + slot, key)
            for other in range(block):
                expected[row, 0, slot, longest + other] = may_look(
                    layer, length + slot, length + other
                )
    if mask is None:
        assert expected.all()
    else:
        assert torch.equal(mask, expected)
        assert not expected.all()
        assert mask.any(dim=-1).all(), "a query that sees nothing"


def test_nothing_hidden_is_none() -> None:
    queries, keys = torch.tensor([[4, 5]]), torch.arange(6)[None]
    assert decode_mask(LayerAttention(), queries, keys) is None
    assert decode_mask(LayerAttention(), queries, keys, torch.ones(1, 6, dtype=torch.bool)) is None
    assert decode_mask(LayerAttention(window=6), queries, keys) is None
    assert decode_mask(LayerAttention(window=5), queries, keys) is not None


def test_window_counts_the_query_itself() -> None:
    mask = decode_mask(
        LayerAttention(window=3, causal=True), torch.tensor([[4]]), torch.arange(7)[None]
    )
    assert mask is not None
    assert mask[0, 0, 0].tolist() == [False, False, True, True, True, False, False]


def test_open_window_looks_as_far_ahead_as_back() -> None:
    mask = decode_mask(LayerAttention(window=2), torch.tensor([[3]]), torch.arange(7)[None])
    assert mask is not None
    assert mask[0, 0, 0].tolist() == [False, False, True, True, True, False, False]


def test_layers_of_a_kind_share_one_mask() -> None:
    slides, full = LayerAttention(window=2, causal=True), LayerAttention()
    masks = decode_masks(
        [slides, full, slides],
        torch.tensor([[3, 4]]),
        torch.arange(3)[None],
        torch.ones(1, 3, dtype=torch.bool),
    )
    assert masks[0] is masks[2]
    assert masks[0] is not None
    assert masks[1] is None

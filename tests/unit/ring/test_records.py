"""Records of a ring: packed and parsed without loss, and refused if they are anything else."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadout.ring.memory import RingError
from leadout.ring.records import RingInfo, RingType, StatesRecord, TextRecord, request_key

KEY = request_key("a request", "salt")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


def ring_info(dtype: RingType = "bfloat16") -> RingInfo:
    return RingInfo(
        target="tiny",
        target_fingerprint="f" * 64,
        layer_ids=(1, 3),
        hidden_size=8,
        dtype=dtype,
        server_id="a server",
    )


def states_record(rows: int = 5) -> StatesRecord:
    states = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
    return StatesRecord(KEY, 7, torch.arange(rows, dtype=torch.int32), states)


def joined(parts: list[bytes | memoryview]) -> bytes:
    return b"".join(parts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_states_come_back_in_the_precision_of_the_ring(dtype: RingType, rows: int) -> None:
    record, info = states_record(rows), ring_info(dtype)
    content = joined(record.packed(info))
    found = StatesRecord.parse(content, info)
    assert (found.key, found.first) == (KEY, 7)
    assert torch.equal(found.tokens, record.tokens)
    assert found.states.dtype == getattr(torch, dtype)
    assert torch.equal(found.states, record.states.to(found.states.dtype))


def test_fp8_states_are_half_as_large_and_as_exact_as_fp8_is() -> None:
    record, info = states_record(64), ring_info("float8")
    record.states[:, 8:] *= 1000  # each layer has a scale of its own
    content = joined(record.packed(info))
    assert len(content) < len(joined(record.packed(ring_info("bfloat16"))))
    found = StatesRecord.parse(content, info).states.float().view(64, 2, 8)
    expected = record.states.view(64, 2, 8)
    largest = expected.abs().amax(-1, keepdim=True)
    assert ((found - expected).abs() <= expected.abs() / 15 + largest / 500).all()


@given(TOKENS, TOKENS, st.floats(0, 2), st.none() | st.integers(0, 2**40))
def test_texts_come_back(
    prompt: list[int], response: list[int], temperature: float, version: int | None
) -> None:
    record = TextRecord(KEY, prompt, response, temperature, version)
    assert TextRecord.parse(joined(record.packed())) == record


def test_keys_depend_on_request_and_salt() -> None:
    ids, salts = ("a", "b"), ("1", "2")
    assert len({request_key(request, salt) for request in ids for salt in salts}) == 4


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(content: bytes) -> None:
    for parse in (TextRecord.parse, lambda each: StatesRecord.parse(each, ring_info())):
        with suppress(RingError):
            parse(content)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_damaged_records_are_refused_or_have_the_right_shape(dtype: RingType) -> None:
    info, chance = ring_info(dtype), random.Random(0)
    states, text = joined(states_record().packed(info)), TextRecord(KEY, [1, 2], [3], 0.5)
    for _ in range(2000):
        for sound, parse in (
            (states, lambda each: StatesRecord.parse(each, info)),
            (joined(text.packed()), TextRecord.parse),
        ):
            damaged = bytearray(sound)
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            try:
                found = parse(bytes(damaged[: chance.choice([None, -1, -4])]))
            except RingError:
                continue
            if isinstance(found, StatesRecord):
                assert found.states.shape == (len(found.tokens), info.width)


def test_a_tag_tells_rings_apart_but_not_servers() -> None:
    info = ring_info()
    assert info.tag == info.model_copy(update={"server_id": "another"}).tag
    for change in ({"hidden_size": 16}, {"layer_ids": (1, 2)}, {"dtype": "float32"}):
        assert info.tag != info.model_copy(update=change).tag

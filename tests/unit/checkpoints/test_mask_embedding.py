"""A trained mask embedding is read like vLLM reads it, without running anything in the file."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leadout.checkpoints import CheckpointError, UnsupportedCheckpointError, read_checkpoint
from leadout.checkpoints.mask_embedding import MASK_EMBEDDING, read_mask_embedding
from support.drafters import MINI, write_random_drafter

HIDDEN = MINI.hidden_size
MASK = MINI.mask_token_id


def written(folder: Path, value: Any, **how: Any) -> Path:
    torch.save(value, folder / MASK_EMBEDDING, **how)
    return folder


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(HIDDEN, dtype=torch.float32).sub(3.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_vllm_reads_is_read(dtype: torch.dtype, protocol: int, tmp_path: Path) -> None:
    table = torch.stack([numbers(dtype), -numbers(dtype)])
    for value in (
        numbers(dtype),
        numbers(dtype)[None],
        table[1],  # a view with an offset
        table.T[:, 0],  # and one with strides
        nn.Parameter(numbers(dtype)),
        {"embedding": numbers(dtype)},
        {"mask_token_id": MASK, "embedding": numbers(dtype)},
    ):
        written(tmp_path, value, pickle_protocol=protocol)
        # PyTorch's reader of weights, which vLLM uses, knows protocol 2 only.
        trusted = torch.load(tmp_path / MASK_EMBEDDING, weights_only=protocol == 2)
        expected = trusted["embedding"] if isinstance(trusted, dict) else trusted
        found = read_mask_embedding(tmp_path, MASK, HIDDEN)
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, expected.reshape(-1))


def test_most_checkpoints_have_none(tmp_path: Path) -> None:
    assert read_mask_embedding(tmp_path, MASK, HIDDEN) is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"mask_token_id": MASK + 1, "embedding": numbers()}, "mask_token_id is 8; expected 7"),
        (numbers()[1:], "has 15 values"),
        (numbers().log(), "NaN or infinite"),
        ({"weights": numbers()}, "has no embedding"),
        (numbers().double(), "values of the type torch DoubleStorage"),
        ([numbers()], "pickle operation EMPTY_LIST"),
        (torch.device("cpu"), "would call torch device"),
    ],
)
def test_what_is_no_embedding_is_refused(value: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem) as refused:
        read_mask_embedding(written(tmp_path, value), MASK, HIDDEN)
    assert refused.value.path == tmp_path / MASK_EMBEDDING


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def with_pickle(folder: Path, pickled: bytes) -> None:
    """A PyTorch file whose pickle is replaced."""
    buffer = io.BytesIO()
    torch.save(numbers(), buffer)
    with (
        zipfile.ZipFile(buffer) as source,
        zipfile.ZipFile(folder / MASK_EMBEDDING, "w") as changed,
    ):
        for name in source.namelist():
            content = pickled if name.endswith("data.pkl") else source.read(name)
            changed.writestr(name, content)


def test_no_code_in_the_file_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with_pickle(tmp_path, pickle.dumps(Exploit(mark), protocol))
        with pytest.raises(CheckpointError):
            read_mask_embedding(tmp_path, MASK, HIDDEN)
    (tmp_path / MASK_EMBEDDING).write_bytes(pickle.dumps(Exploit(mark)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_mask_embedding(tmp_path, MASK, HIDDEN)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Exploit(mark)))  # noqa: S301
    assert mark.exists()  # the exploit works where it is unpickled


@pytest.mark.parametrize("length", [0, 1, 40, 90])
def test_a_pickle_that_ends_early(length: int, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(numbers(), buffer)
    with zipfile.ZipFile(buffer) as source:
        (name,) = [name for name in source.namelist() if name.endswith("data.pkl")]
        with_pickle(tmp_path, source.read(name)[:length])
    with pytest.raises(CheckpointError):
        read_mask_embedding(tmp_path, MASK, HIDDEN)


def test_values_outside_of_the_stored_ones_are_refused(tmp_path: Path) -> None:
    written(tmp_path, numbers())
    with zipfile.ZipFile(tmp_path / MASK_EMBEDDING) as source:
        (name,) = [name for name in source.namelist() if name.endswith("data.pkl")]
        pickled = source.read(name)
    # K\x00: the offset; K\x10: the size.
    with_pickle(tmp_path, pickled.replace(b"K\x00K\x10", b"K\x08K\x10"))
    with pytest.raises(CheckpointError):
        read_mask_embedding(tmp_path, MASK, HIDDEN)


def test_only_a_served_drafter_may_have_one(tmp_path: Path) -> None:
    folder = written(write_random_drafter(tmp_path / "drafter", MINI), numbers())
    with pytest.raises(UnsupportedCheckpointError, match="trained mask embedding"):
        read_checkpoint(folder)
    assert read_checkpoint(folder, as_served=True).left_to_vllm == ("a trained mask embedding",)
    written(folder, numbers()[1:])
    with pytest.raises(CheckpointError, match="15 values"):
        read_checkpoint(folder, as_served=True)

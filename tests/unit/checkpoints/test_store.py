"""Nothing in a checkpoint is ever executed or unpickled, and nothing outside it is read."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest

from leadout.checkpoints import (
    CheckpointError,
    UnsupportedCheckpointError,
    convert,
    load_drafter,
    read_checkpoint,
    write_checkpoint,
)
from support.drafters import MINI, edit_config, random_weights, shard


class Exploit:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


def test_the_exploit_works(mark: Path) -> None:
    pickle.loads(pickle.dumps(Exploit(mark)))  # noqa: S301
    assert mark.exists()


def test_remote_code_is_not_imported(zlab_folder: Path, mark: Path, tmp_path: Path) -> None:
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass DFlashDraftModel: ...\n"
    for name in ("dflash.py", "custom_code.py", "configuration_dflash.py", "__init__.py"):
        (zlab_folder / name).write_text(code)
    edit_config(
        zlab_folder,
        lambda config: config.update(
            auto_map={
                "AutoConfig": "configuration_dflash.Config",
                "AutoModel": "dflash.DFlashDraftModel",
            },
            trust_remote_code=True,
        ),
    )
    load_drafter(zlab_folder)
    convert(zlab_folder, tmp_path / "converted", "speculators", target_name="some/target")
    assert not mark.exists()
    assert {path.name for path in (tmp_path / "converted").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert "auto_map" not in (tmp_path / "converted" / "config.json").read_text()


def test_a_mask_embedding_is_refused_unopened(zlab_folder: Path, mark: Path) -> None:
    (zlab_folder / "mask_embedding.pt").write_bytes(pickle.dumps(Exploit(mark)))
    with pytest.raises(UnsupportedCheckpointError, match="trained mask embedding"):
        load_drafter(zlab_folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "drafter.ckpt"])
def test_pickled_weights_are_refused_unopened(name: str, zlab_folder: Path, mark: Path) -> None:
    (zlab_folder / "model.safetensors").unlink()
    (zlab_folder / name).write_bytes(pickle.dumps(Exploit(mark)))
    with pytest.raises(UnsupportedCheckpointError, match="can run code") as caught:
        load_drafter(zlab_folder)
    assert caught.value.field == name
    assert not mark.exists()


def test_a_pickle_next_to_the_weights_is_left_alone(zlab_folder: Path, mark: Path) -> None:
    (zlab_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(mark)))
    load_drafter(zlab_folder)
    assert not mark.exists()


def test_a_pickle_under_the_name_of_safetensors(zlab_folder: Path, mark: Path) -> None:
    (zlab_folder / "model.safetensors").write_bytes(pickle.dumps(Exploit(mark)))
    with pytest.raises(CheckpointError, match="a complete safetensors file"):
        load_drafter(zlab_folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_out_of_the_folder_are_not_followed(name: str, zlab_folder: Path) -> None:
    outside = zlab_folder.parent / "outside"
    outside.mkdir()
    shutil.move(zlab_folder / name, outside / name)
    (zlab_folder / name).symlink_to(outside / name)
    with pytest.raises(CheckpointError, match="a link to") as caught:
        load_drafter(zlab_folder)
    assert caught.value.field == name


def test_a_linked_shard_is_not_followed(zlab_folder: Path) -> None:
    shard(zlab_folder)
    name = "model-00001-of-00002.safetensors"
    shutil.move(zlab_folder / name, zlab_folder.parent / name)
    (zlab_folder / name).symlink_to(zlab_folder.parent / name)
    with pytest.raises(CheckpointError, match="a link to"):
        load_drafter(zlab_folder)


@pytest.mark.parametrize("subfolder", ["", "dflash"])
def test_links_of_the_hub_cache_are_followed(
    subfolder: str, zlab_folder: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--z-lab--drafter"
    snapshot, blobs = repository / "snapshots" / "0123" / subfolder, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.move(zlab_folder / name, blobs / f"hash-of-{name}")
        (snapshot / name).symlink_to(blobs / f"hash-of-{name}")
    assert read_checkpoint(snapshot).format == "zlab"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_file_modes_follow_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    previous = os.umask(umask)
    try:
        write_checkpoint(tmp_path / "new", random_weights(MINI), MINI, "zlab")
    finally:
        os.umask(previous)
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) == mode

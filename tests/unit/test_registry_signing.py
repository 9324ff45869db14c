"""Versions signed by a key: what the key has not signed is never used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from leadout.engine.settings import RegistrySettings, with_section
from leadout.registry import (
    MANIFEST,
    Registry,
    RegistryError,
    RegistryKey,
    RegistryKeyError,
    WrongSignatureError,
)

PLAIN = NoEncryption()


def private_pem(key: Any, encryption: KeySerializationEncryption = PLAIN) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return pem


def public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


def key_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Files with a private and its public key."""
    key = Ed25519PrivateKey.generate()
    private = key_file(tmp_path / "private.pem", private_pem(key))
    return private, key_file(tmp_path / "public.pem", public_pem(key))


@pytest.fixture
def signed(tmp_path: Path, drafter: Path, keys: tuple[Path, Path]) -> Path:
    """A registry whose version 1 is signed."""
    folder = tmp_path / "registry"
    Registry(folder, RegistryKey.read(keys[0])).publish(drafter, target_fingerprint="t")
    return folder


def change_manifest(registry: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = registry / "versions" / "0001" / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_servers_accept_what_the_learner_signed(signed: Path, keys: tuple[Path, Path]) -> None:
    public = RegistryKey.read(keys[1])
    assert not public.can_sign
    assert Registry(signed, public).verify(1).target_fingerprint == "t"
    change_manifest(signed, lambda content: None)  # another format, the same content
    assert Registry(signed, public).verify(1).version == 1
    assert Registry(signed).verify(1).version == 1  # without a key signatures do not matter


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(signature=None),
        lambda content: content.pop("signature"),
        lambda content: content.update(signature="AAAA"),
        lambda content: content.update(signature="not base64"),
        lambda content: content.update(target_fingerprint="another"),
        lambda content: content["files"].update({"model.safetensors": "0" * 64}),
        lambda content: content.update(field_of_a_later_release=1),
    ],
)
def test_any_change_of_a_manifest_is_found(
    signed: Path, keys: tuple[Path, Path], change: Callable[[dict[str, Any]], None]
) -> None:
    registry = Registry(signed, RegistryKey.read(keys[1]))
    change_manifest(signed, change)
    with pytest.raises(WrongSignatureError, match=r"is not signed|no valid signature"):
        registry.manifest(1)
    assert list(registry.readable_manifests()) == []  # nor is it rolled back to
    with pytest.raises(WrongSignatureError):
        registry.point_to(1, "by hand")


def test_a_version_of_another_key_is_refused_until_the_key_is_added(
    signed: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    other = Ed25519PrivateKey.generate()
    path = key_file(tmp_path / "other.pem", public_pem(other))
    with pytest.raises(WrongSignatureError, match="no valid signature"):
        Registry(signed, RegistryKey.read(path)).verify(1)
    key_file(path, public_pem(other) + keys[1].read_bytes())
    assert Registry(signed, RegistryKey.read(path)).verify(1).version == 1


def test_a_signed_manifest_does_not_count_for_another_version(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    versions = signed / "versions"
    shutil.copytree(versions / "0001", versions / "0002")
    with pytest.raises(RegistryError, match="describes version 1, expected version 2"):
        Registry(signed, RegistryKey.read(keys[1])).manifest(2)


def test_changed_weights_are_found_in_a_signed_version(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    (signed / "versions" / "0001" / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(RegistryError, match="changed since publishing"):
        Registry(signed, RegistryKey.read(keys[1])).verify(1)


def test_what_is_loaded_is_what_was_hashed(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(signed, RegistryKey.read(keys[1]))
    with registry.private_copy(1) as (manifest, folder):
        assert {path.name for path in folder.iterdir()} == set(manifest.files)
        assert folder.stat().st_mode & 0o077 == 0
        (signed / "versions" / "0001" / "model.safetensors").write_bytes(b"changed")
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not folder.exists()
    (signed / "versions" / "0001" / "model.safetensors").write_bytes(b"weights")
    real = shutil.copyfile

    def change_first(source: Path, target: Path) -> Path:
        """Somebody writes after the files were verified, and before they are copied."""
        Path(source).write_bytes(b"changed")
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", change_first)
    with pytest.raises(RegistryError, match="changed while it was read"), registry.private_copy(1):
        pass


def test_a_public_key_cannot_sign(tmp_path: Path, drafter: Path, keys: tuple[Path, Path]) -> None:
    registry = Registry(tmp_path / "registry", RegistryKey.read(keys[1]))
    with pytest.raises(RegistryKeyError, match="Give the learner the private key"):
        registry.publish(drafter, target_fingerprint="t")
    assert registry.versions() == []


def test_a_learner_needs_the_private_key(keys: tuple[Path, Path]) -> None:
    from leadout.learn.config import LearnError
    from leadout.learn.prepare import signing_key

    with pytest.raises(LearnError, match="is a public key, expected the private one"):
        signing_key(keys[1])
    key = signing_key(keys[0])
    assert key is not None
    assert key.can_sign


def test_files_that_are_no_keys(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    wrong = {
        "empty": b"",
        "text": b"secret",
        "broken": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        "encrypted": private_pem(key, BestAvailableEncryption(b"password")),
        "rsa": private_pem(generate_private_key(65537, 2048)),
    }
    for name, content in wrong.items():
        with pytest.raises(RegistryKeyError, match="openssl genpkey"):
            RegistryKey.read(key_file(tmp_path / name, content))


def test_every_process_of_a_server_reads_the_key(signed: Path, keys: tuple[Path, Path]) -> None:
    from types import SimpleNamespace

    from leadout.engine.settings import REGISTRY, followed_registry

    section = RegistrySettings(folder=signed, key=keys[1])
    config = SimpleNamespace(additional_config=with_section({}, REGISTRY, section))
    registry = followed_registry(config)
    assert registry is not None
    change_manifest(signed, lambda content: content.pop("signature"))
    with pytest.raises(WrongSignatureError):
        registry.verify(1)

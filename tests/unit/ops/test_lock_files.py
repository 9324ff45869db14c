"""Lock files fit pyproject.toml, and their bills of materials name the same packages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.models import ROOT
from support.ops_files import OPS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("make_locks", OPS / "lock" / "make_locks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


locks: Any = _script()
LOCKS = pytest.mark.parametrize("lock", locks.LOCKS, ids=lambda lock: lock.name)


def not_locked(lock: Any, requirements: list[str]) -> list[str]:
    """Requirements that no pin of a lock satisfies."""
    versions = {pin.name: pin.version for pin in locks.read_lock(lock.path)}
    missing = []
    for text in requirements:
        wanted = Requirement(text)
        environment = {"python_version": lock.python, "platform_machine": "x86_64"}
        if wanted.marker is not None and not wanted.marker.evaluate(environment):
            continue
        version = versions.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(text)
    return missing


@LOCKS
def test_the_lock_satisfies_what_the_project_requires(lock: Any) -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    wanted += [each for extra in lock.extras for each in project["optional-dependencies"][extra]]
    remedy = "run ops/lock/make_locks.py"
    assert not_locked(lock, wanted) == [], remedy
    assert not_locked(lock, ["leadout-nothing", "torch>=99"]) == ["leadout-nothing", "torch>=99"]


@LOCKS
def test_every_package_has_a_version_and_hashes(lock: Any) -> None:
    pins = locks.read_lock(lock.path)
    lines = [line for line in lock.path.read_text().splitlines() if re.match(r"\S", line)]
    assert len(pins) == len([line for line in lines if not line.startswith("#")]) > 100
    assert all(pin.hashes for pin in pins)
    assert not {pin.name for pin in pins} & set(lock.without)


@LOCKS
def test_the_bill_of_materials_is_valid_and_of_this_lock(lock: Any) -> None:
    text = lock.sbom_path.read_text()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    sbom = json.loads(text)
    found = {(each["name"], each["version"]) for each in sbom["components"]}
    assert found == {(pin.name, pin.version) for pin in locks.read_lock(lock.path)}
    (recorded,) = sbom["metadata"]["component"]["properties"]
    assert recorded["value"] == hashlib.sha256(lock.path.read_bytes()).hexdigest()
    references = {each["bom-ref"] for each in sbom["components"]}
    root = next(each for each in sbom["dependencies"] if each["ref"] == "leadout")
    assert len(root["dependsOn"]) > 10
    assert set(root["dependsOn"]) <= references
    del sbom["components"][0]["name"]
    assert validator.validate_str(json.dumps(sbom)) is not None


def test_the_same_lock_gives_the_same_bill(tmp_path: Path) -> None:
    lock = locks.LOCKS[0]
    before = lock.sbom_path.read_bytes()
    copy = tmp_path / lock.path.name
    copy.write_bytes(lock.path.read_bytes())
    locks.FOLDER, original = tmp_path, locks.FOLDER
    try:
        locks.write_sbom(lock)
    finally:
        locks.FOLDER = original
    assert (tmp_path / lock.sbom_path.name).read_bytes() == before


def test_images_install_their_locks() -> None:
    for name, file in (("gpu", "Containerfile"), ("cpu", "Containerfile.cpu")):
        text = (OPS / file).read_text()
        assert f"COPY ops/lock/{name}.txt" in text
        assert "--no-deps --require-hashes" in text
        assert "--no-deps --no-build-isolation ." in text
    python = next(lock.python for lock in locks.LOCKS if lock.name == "cpu")
    assert f"/python:{python}-slim" in (OPS / "Containerfile.cpu").read_text()

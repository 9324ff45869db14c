"""Constraints and lock files fit pyproject.toml and CI, and bills of materials fit the locks."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from importlib import metadata
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
REMEDY = "run ops/lock/make_locks.py"


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


def required(lock: Any) -> list[str]:
    project = PROJECT["project"]
    extras = [each for name in lock.extras for each in project["optional-dependencies"][name]]
    return [*project["dependencies"], *PROJECT["build-system"]["requires"], *extras]


def not_locked(versions: Mapping[str, str], requirements: list[str], python: str) -> list[str]:
    """Requirements that no pinned version satisfies."""
    missing = []
    for text in requirements:
        wanted = Requirement(text)
        environment = {"python_version": python, "platform_machine": "x86_64"}
        if wanted.marker is not None and not wanted.marker.evaluate(environment):
            continue
        version = versions.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(text)
    return missing


def differences(versions: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Packages of which both have a version, and not the same; "+cpu" is no difference."""
    return [
        f"{name}: {versions[name]} and {others[name]}"
        for name in sorted(versions.keys() & others.keys())
        if versions[name].partition("+")[0] != others[name].partition("+")[0]
    ]


@LOCKS
def test_the_lock_satisfies_what_the_project_requires(lock: Any) -> None:
    versions = {pin.name: pin.version for pin in locks.read_lock(lock.path)}
    assert not_locked(versions, required(lock), lock.python) == [], REMEDY
    absent = ["leadout-nothing", "torch>=99"]
    assert not_locked(versions, absent, lock.python) == absent


def test_the_constraints_satisfy_what_the_project_requires() -> None:
    versions = locks.read_constraints()
    assert not_locked(versions, required(locks.CI), locks.CI.python) == [], REMEDY
    lines = [line for line in locks.CONSTRAINTS.read_text().splitlines() if line[0] != "#"]
    assert len(lines) == len(versions) > 100


@LOCKS
def test_locks_have_the_versions_of_the_constraints(lock: Any) -> None:
    pinned = {pin.name: pin.version for pin in locks.read_lock(lock.path)}
    constraints = locks.read_constraints()
    assert differences(constraints, pinned) == [], REMEDY
    if lock.name == "cpu":
        assert pinned.keys() <= constraints.keys() | set(locks.ENGINE_CHOOSES)
    assert not constraints.keys() & set(locks.ENGINE_CHOOSES)
    assert differences({"torch": "2.13.0", "a": "1"}, {"torch": "2.13.0+cpu", "a": "1.1"}) == [
        "a: 1 and 1.1"
    ]


def test_ci_installs_with_the_constraints() -> None:
    recipe = (ROOT / ".ci" / "environment").read_text()
    (options,) = re.findall(r'^pip="python -m pip install (.*)"$', recipe, re.MULTILINE)
    assert "--constraint constraints.txt" in options
    (extras,) = re.findall(r'"\.\[(.*)\]"', recipe)
    assert tuple(extras.split(",")) == locks.CI.extras
    (key,) = re.findall(r"^key=.*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert "constraints.txt" in key, "other constraints must give another environment"


@pytest.mark.skipif("LEADOUT_CI" not in os.environ, reason="a developer may have other versions")
def test_the_environment_of_ci_has_the_versions_of_the_constraints() -> None:
    # Of the environment only: setuptools may have added its own copies of packages to sys.path.
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    found = metadata.distributions(path=folders)
    installed = {canonicalize_name(each.name): each.version for each in found}
    constraints = locks.read_constraints()
    assert differences(constraints, installed) == []
    assert constraints.keys() <= installed.keys()


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

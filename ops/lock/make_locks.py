"""Writes constraints.txt, the lock files of this folder, and a bill of materials (SBOM) for each.

    UV_FIND_LINKS=https://download.pytorch.org/whl/cpu/torch/ python ops/lock/make_locks.py

constraints.txt has the versions with which CI runs, for `pip install --constraint`; the locks have
the same. `NAME.txt` has every package of an image with its version and the hashes of its files,
for `pip install --no-deps --require-hashes`; `NAME.cdx.json` is the same set in CycloneDX's format,
with who needs whom. Versions that are locked already are kept while pyproject.toml allows them;
`--upgrade` takes the newest. Needs `pip install uv` and the development extra. The CPU build of
torch is not on PyPI, so uv's own variable says where it is.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parents[1] / "pyproject.toml"
CONSTRAINTS = PROJECT.with_name("constraints.txt")
LOCK_HASH = "leadout:lock:sha256"
_PIN = re.compile(r"([a-z0-9-]+)==(\S+) \\")
_NEEDED_BY = re.compile(r"    #(?: via|  ) +([a-z0-9-]+)")


@dataclass(frozen=True)
class Lock:
    """What is locked together, for one image."""

    name: str
    extras: tuple[str, ...]
    python: str
    platform: str = "x86_64-manylinux_2_28"
    without: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    @property
    def sbom_path(self) -> Path:
        return FOLDER / f"{self.name}.cdx.json"


# PyPI's builds of these are for CUDA; beside a CPU torch they break transformers.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
LOCKS = (
    Lock("gpu", ("vllm", "bench", "crypto", "s3"), python="3.12"),
    Lock("cpu", ("cpu", "bench", "crypto", "s3"), python="3.11", without=CUDA_ONLY),
)


# What .ci/environment installs.
CI = Lock("ci", ("bench", "cpu", "data", "dev", "docs", "s3"), python="3.11", without=CUDA_ONLY)
# The two builds of vLLM require different versions of these.
ENGINE_CHOOSES = ("apache-tvm-ffi", "setuptools", "triton")


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    hashes: tuple[str, ...]
    needed_by: tuple[str, ...]


def read_lock(path: Path) -> list[Pin]:
    """The pins of a file that uv wrote."""
    pins: list[Pin] = []
    for block in re.split(r"\n(?=[a-z0-9])", path.read_text()):
        found = _PIN.match(block)
        if found is None:
            continue
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
        pins.append(Pin(found[1], found[2], tuple(hashes), tuple(_NEEDED_BY.findall(block))))
    return pins


def read_constraints() -> dict[str, str]:
    """Versions by name."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))


def compile_lock(lock: Lock, path: Path, *options: str) -> str:
    """What uv resolves for a lock; versions that `path` has already are kept."""
    build = tomllib.loads(PROJECT.read_text())["build-system"]["requires"]
    command = ["uv", "pip", "compile", "--quiet", "--no-header", *options]
    command += ["--python-version", lock.python, "--python-platform", lock.platform]
    command += [word for name in lock.extras for word in ("--extra", name)]
    command += [word for name in lock.without for word in ("--no-emit-package", name)]
    command += ["--output-file", str(path), str(PROJECT), "-"]
    subprocess.run(command, input="\n".join(build), text=True, check=True, cwd=PROJECT.parent)
    return path.read_text().replace(f"{PROJECT.parent}/", "")


def write_constraints(upgrade: bool) -> None:
    found = compile_lock(CI, CONSTRAINTS, "--no-annotate", *(["--upgrade"] if upgrade else []))
    pins = re.findall(r"^([a-z0-9-]+)==([^+\s]+)", found, re.MULTILINE)  # torch without "+cpu"
    head = (
        f"# Versions with which CI runs (Python {CI.python}, vLLM for CPUs):\n"
        "#     pip install '.[cpu]' --constraint constraints.txt\n"
        "# Written by ops/lock/make_locks.py.\n"
    )
    lines = [f"{name}=={version}\n" for name, version in pins if name not in ENGINE_CHOOSES]
    CONSTRAINTS.write_text(head + "".join(lines))


def write_lock(lock: Lock, upgrade: bool) -> None:
    options = ["--generate-hashes", "--constraint", str(CONSTRAINTS)]
    text = compile_lock(lock, lock.path, *options, *(["--upgrade"] if upgrade else []))
    # "-c constraints.txt" would stand under almost every package.
    text = re.sub(rf"    #(?: via|  ) -c {CONSTRAINTS.name}\n", "", text)
    text = re.sub(r"# via\n    #   (.+)\n(?!    #)", r"# via \1\n", text)
    head = (
        f"# Python {lock.python} on {lock.platform}, with the extras {', '.join(lock.extras)}.\n"
        "# Written by ops/lock/make_locks.py; install with --no-deps --require-hashes.\n"
    )
    lock.path.write_text(head + text.removeprefix(head))


def write_sbom(lock: Lock) -> None:
    digest = hashlib.sha256(lock.path.read_bytes()).hexdigest()
    # A serial number and no time: the same lock gives the same file.
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"leadout:{digest}"))
    bom.metadata.timestamp = None  # type: ignore[assignment]
    root = Component(
        name="leadout",
        type=ComponentType.APPLICATION,
        bom_ref="leadout",
        properties=[Property(name=LOCK_HASH, value=digest)],
    )
    bom.metadata.component = root
    pins = read_lock(lock.path)
    parts = {}
    for pin in pins:
        purl = PackageURL("pypi", name=pin.name, version=pin.version)
        parts[pin.name] = Component(
            name=pin.name, version=pin.version, purl=purl, bom_ref=str(purl)
        )
        bom.components.add(parts[pin.name])
    needs: dict[str, list[Component]] = {name: [] for name in ("leadout", *parts)}
    for pin in pins:
        for name in pin.needed_by:
            if name in needs:  # all but packages that are left out
                needs[name].append(parts[pin.name])
    for name, needed in needs.items():
        bom.register_dependency(root if name == "leadout" else parts[name], needed)
    lock.sbom_path.write_text(JsonV1Dot6(bom).output_as_string(indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    write_constraints(upgrade)
    for lock in LOCKS:
        write_lock(lock, upgrade)
        write_sbom(lock)


if __name__ == "__main__":
    main()

"""The wheel and the source distribution, and environments in which only the wheel is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.models import ROOT

# .ci/environment removes these dependencies of vLLM again, as the quickstart does.
REMOVED = {"torchvision", "torchaudio", "torchcodec"}


@dataclass(frozen=True)
class Distributions:
    wheel: Path
    sdist: Path


def build_distributions(folder: Path, tree: Path = ROOT) -> Distributions:
    """As for a release: the source distribution of `tree`, and the wheel that is built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    ended = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@dataclass(frozen=True)
class Installed:
    """A virtual environment that has Leadout from a wheel and nothing that it does not require."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses it, as after `. bin/activate`."""
        given = clean_environment()
        return {**given, "PATH": f"{self.folder / 'bin'}:{given['PATH']}"}

    def run(self, *command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
        )


def install_wheel(wheel: Path, folder: Path, extras: Iterable[str] = ()) -> Installed:
    """What `pip install 'WHEEL[EXTRAS]'` makes of an empty environment, within seconds.

    pip installs the wheel itself. Its dependencies, and theirs, are links to the packages of the
    environment that runs the tests: to these only, so a dependency that pyproject.toml does not
    name is missing here as it would be on a user's machine.
    """
    venv.create(folder, symlinks=True)
    installed = Installed(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(installed.python), "install"]
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, str(wheel)], check=True, env=clean_environment())
    (site,) = (folder / "lib").glob("python3*/site-packages")
    for distribution in dependencies(own_requirements(site), extras):
        for name in top_level(distribution):
            link, original = site / name, Path(str(distribution.locate_file(name)))
            if not link.exists() and original.exists():
                link.symlink_to(original)
    return installed


def own_requirements(site: Path) -> list[str]:
    (found,) = metadata.distributions(name="leadout", path=[str(site)])
    return found.requires or []


def dependencies(
    requirements: Iterable[str], extras: Iterable[str] = ()
) -> list[metadata.Distribution]:
    """The installed distributions that requirements need, directly or not."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    left = [(line, extra) for line in requirements for extra in ("", *extras)]
    while left:
        line, extra = left.pop()
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(wanted.name)
        if name in REMOVED:
            continue
        if name not in found:
            found[name] = metadata.distribution(name)
        for more in ("", *wanted.extras):
            if (name, more) not in seen:
                seen.add((name, more))
                left += [(each, more) for each in found[name].requires or []]
    return list(found.values())


def top_level(distribution: metadata.Distribution) -> set[str]:
    """Files and folders of a distribution in site-packages, without its scripts."""
    files = distribution.files or []
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


def clean_environment() -> dict[str, str]:
    """The variables of this process without those by which Python finds the tree."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in hidden}

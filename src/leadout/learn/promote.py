"""The end of a cycle: a version that servers swap in, or a line that says why not."""

from __future__ import annotations

from pathlib import Path

from leadout.check.static import static_findings
from leadout.checkpoints import read_checkpoint
from leadout.findings import Severity
from leadout.learn.config import LearnError
from leadout.learn.gate import Decision, Evidence
from leadout.learn.prepare import require_learnable
from leadout.learn.report import Adaptation, Started, numbers_of, promises_of
from leadout.models import fingerprint, local_folder
from leadout.registry import Manifest, Registry


def promote(
    registry: Registry,
    candidate: Path,
    target_fingerprint: str,
    decision: Decision,
    evidence: Evidence,
    adaptation: Adaptation,
) -> tuple[Decision, int]:
    """Publish a candidate that has passed, and point to it unless another version serves now.

    Returns the decision as it stands then, and the version.
    """
    why = "; ".join(decision.reasons)
    numbers = numbers_of(evidence, adaptation)
    manifest = _published(registry, candidate, adaptation.parent)
    if manifest is None:
        manifest = registry.publish(
            candidate,
            target_fingerprint=target_fingerprint,
            parent=adaptation.parent,
            expected=promises_of(evidence),
        )
        registry.record("published", manifest.version, why)
    pointer = registry.pointer()
    serving = None if pointer is None else pointer.version
    if serving != adaptation.parent:
        # A rollback, or another learner: what the gate compared with is not what is served.
        reason = (
            f"serving: found version {serving}, wanted {adaptation.parent}, which the candidate "
            "was compared with: the pointer has moved since"
        )
        registry.record("rejected", manifest.version, reason, numbers)
        return Decision(passed=False, reasons=[reason]), manifest.version
    registry.point_to(manifest.version, why)
    registry.record("promoted", manifest.version, why, numbers)
    return decision, manifest.version


def reject(
    registry: Registry, decision: Decision, evidence: Evidence, adaptation: Adaptation
) -> None:
    registry.record("rejected", None, "; ".join(decision.reasons), numbers_of(evidence, adaptation))


def start_registry(target: str, folder: Path, drafter: str) -> Started:
    """Version 1 of a new registry, which is served from now on."""
    registry = Registry(folder)
    pointer = registry.pointer()
    if pointer is not None:
        raise LearnError(
            f"--start {drafter}: found a registry in {folder} that serves version "
            f"{pointer.version}, wanted none; leave --start out, or name a new folder"
        )
    target_folder, source = local_folder(target), local_folder(drafter)
    unfit = [
        finding
        for finding in static_findings(target_folder, source, target_name=target)
        if finding.severity is Severity.ERROR
    ]
    if unfit:
        told = "\n".join(f"{finding.name}: {finding.message}" for finding in unfit)
        raise LearnError(f"--start {drafter}: target and drafter do not fit\n{told}")
    require_learnable(read_checkpoint(source))
    manifest = registry.publish(source, target_fingerprint=fingerprint(target_folder))
    why = f"the first of this registry: {source.name}"
    registry.record("published", manifest.version, why)
    registry.point_to(manifest.version, why)
    registry.record("promoted", manifest.version, why)
    return Started(version=manifest.version, drafter=drafter, fingerprint=manifest.fingerprint)


def _published(registry: Registry, candidate: Path, parent: int) -> Manifest | None:
    """The candidate's version, if an earlier cycle was cut off after publishing it."""
    found = fingerprint(candidate)
    manifests = (registry.manifest(version) for version in registry.versions())
    return next((m for m in manifests if (m.fingerprint, m.parent) == (found, parent)), None)

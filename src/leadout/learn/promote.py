"""The end of a cycle: a new version that servers swap in, or a ledger entry with the reasons."""

from __future__ import annotations

from pathlib import Path

from leadout.check.static import static_findings
from leadout.checkpoints import read_checkpoint
from leadout.files import require_writable
from leadout.findings import Severity
from leadout.learn.config import LearnError
from leadout.learn.gate import Decision, Evidence
from leadout.learn.prepare import require_learnable
from leadout.learn.report import Adaptation, Started, expected_acceptance, ledger_evidence
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
    """Publish a candidate that has passed, and serve it unless the serving version has changed.

    Returns the final decision and the version of the candidate.
    """
    why = "; ".join(decision.reasons)
    numbers = ledger_evidence(evidence, adaptation)
    manifest = _published(registry, candidate, adaptation.parent)
    if manifest is None:
        manifest = registry.publish(
            candidate,
            target_fingerprint=target_fingerprint,
            parent=adaptation.parent,
            expected=expected_acceptance(evidence),
        )
        registry.record("published", manifest.version, why)
    pointer = registry.pointer()
    serving = None if pointer is None else pointer.version
    if serving != adaptation.parent:
        # A rollback or another cycle: the candidate was compared with a version that is no longer
        # served.
        reason = (
            f"serving: version {serving} is served now, but the candidate was compared with "
            f"version {adaptation.parent}"
        )
        registry.record("rejected", manifest.version, reason, numbers)
        return Decision(passed=False, reasons=[reason]), manifest.version
    registry.point_to(manifest.version, why)
    registry.record("promoted", manifest.version, why, numbers)
    return decision, manifest.version


def reject(
    registry: Registry, decision: Decision, evidence: Evidence, adaptation: Adaptation
) -> None:
    """Record in the ledger why a candidate was not published."""
    reasons = "; ".join(decision.reasons)
    registry.record("rejected", None, reasons, ledger_evidence(evidence, adaptation))


def start_registry(target: str, folder: Path, drafter: str) -> Started:
    """Create a registry that serves a drafter as its version 1."""
    require_writable("--registry", folder)
    registry = Registry(folder)
    pointer = registry.pointer()
    if pointer is not None:
        raise LearnError(
            f"--start {drafter}: {folder} already is a registry, which serves version "
            f"{pointer.version}. Omit --start, or choose a new folder."
        )
    target_folder, source = local_folder(target), local_folder(drafter)
    unfit = [
        finding
        for finding in static_findings(target_folder, source, target_name=target)
        if finding.severity is Severity.ERROR
    ]
    if unfit:
        reasons = "\n".join(f"{finding.name}: {finding.message}" for finding in unfit)
        raise LearnError(f"--start {drafter}: the drafter does not fit the target.\n{reasons}")
    require_learnable(read_checkpoint(source))
    manifest = registry.publish(source, target_fingerprint=fingerprint(target_folder))
    why = f"first version: {source.name}"
    registry.record("published", manifest.version, why)
    registry.point_to(manifest.version, why)
    registry.record("promoted", manifest.version, why)
    return Started(version=manifest.version, drafter=drafter, fingerprint=manifest.fingerprint)


def _published(registry: Registry, candidate: Path, parent: int) -> Manifest | None:
    """The candidate's version, if an interrupted cycle has already published it."""
    found = fingerprint(candidate)
    manifests = (registry.manifest(version) for version in registry.versions())
    return next((m for m in manifests if (m.fingerprint, m.parent) == (found, parent)), None)

"""Kubernetes' pod security standard "restricted", which includes "baseline", as a check of pods.

After https://kubernetes.io/docs/concepts/security/pod-security-standards/: the controls of both
levels for Linux pods. It stands for a cluster that enforces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Pod = dict[str, Any]

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
}
SELINUX_TYPES = {"container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def pods_of(resource: dict[str, Any]) -> list[Pod]:
    """The pods that a resource makes."""
    spec = resource.get("spec", {})
    if resource["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    return [spec["template"]["spec"]] if "template" in spec else []


def violations(pod: Pod) -> list[str]:
    """The fields of a pod that "restricted" forbids; empty if it is admitted."""
    return [*_of_pod(pod), *(each for one in containers(pod) for each in _of_container(pod, one))]


def containers(pod: Pod) -> list[dict[str, Any]]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [each for kind in kinds for each in pod.get(kind, [])]


def _of_pod(pod: Pod) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    for volume in pod.get("volumes", []):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volumes: {volume['name']}"
    context = pod.get("securityContext", {})
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctls: {sysctl['name']}"


def _of_container(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    own, shared = container.get("securityContext", {}), pod.get("securityContext", {})
    both = {**shared, **own}  # a container's own value counts
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities.drop"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if both.get("runAsUser") == 0:
        yield "runAsUser"
    profiles = ("RuntimeDefault", "Localhost")
    if both.get("seccompProfile", {}).get("type") not in profiles:
        yield "seccompProfile"
    if both.get("appArmorProfile", {"type": "RuntimeDefault"}).get("type") not in profiles:
        yield "appArmorProfile"
    selinux = both.get("seLinuxOptions", {})
    if selinux.get("type", "container_t") not in SELINUX_TYPES:
        yield "seLinuxOptions.type"
    if selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions.user or role"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if both.get("windowsOptions", {}).get("hostProcess"):
        yield "windowsOptions.hostProcess"

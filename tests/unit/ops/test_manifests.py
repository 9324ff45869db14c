"""Manifests keep Kubernetes' schema and pod security, fit each other, and use flags that exist.

There is no cluster here: schemas and a check of the "restricted" standard stand for one.
"""

import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from leadout.cli.app import app
from support.ops_files import OPS
from support.pod_security import containers, pods_of, violations

KUBERNETES = OPS / "kubernetes"
SERVING, LEARNING = KUBERNETES / "serving", KUBERNETES / "learning"
PATCH = LEARNING / "server.yaml"  # of the deployment; no resource of its own
FILES = sorted(
    path
    for path in KUBERNETES.rglob("*.yaml")
    if path.name != "kustomization.yaml" and path != PATCH
)
BY_HAND = {"check.yaml", "start.yaml"}  # jobs that are applied once, before the rest
IMAGE = re.compile(r"[a-z0-9./-]+@sha256:[0-9a-f]{64}")


def resources(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each
        for path in FILES
        for each in resources(path)
        if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def all_pods() -> list[dict[str, Any]]:
    return [pod for path in FILES for each in resources(path) for pod in pods_of(each)]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """The resources that `kubectl apply -k` sends."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True
    )
    return [each for each in yaml.safe_load_all(made.stdout) if each]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_schema_is_kept(path: Path) -> None:
    for each in resources(path):
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_the_schema_is_no_empty_word() -> None:
    broken = named("Deployment", "leadout")
    broken["spec"]["template"]["spec"]["containers"][0]["comand"] = ["leadout"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_services_and_prometheus_find_the_pods() -> None:
    pods = named("Deployment", "leadout")["spec"]["template"]
    (container,) = pods["spec"]["containers"]
    (port,) = container["ports"]
    for name in ("leadout", "leadout-pods"):
        service = named("Service", name)["spec"]
        assert service["selector"].items() <= pods["metadata"]["labels"].items()
        assert service["ports"][0]["targetPort"] == port["name"]
    prometheus = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    (by_name,) = [
        config["dns_sd_configs"][0]
        for config in prometheus["scrape_configs"]
        if "dns_sd_configs" in config
    ]
    assert by_name["names"][0].startswith("leadout-pods.")
    assert by_name["port"] == port["containerPort"]
    assert f"--port={port['containerPort']}" in container["args"]


def test_volumes_are_there_and_the_kustomizations_name_the_files() -> None:
    claims = {
        each["metadata"]["name"]
        for path in FILES
        for each in resources(path)
        if each["kind"] == "PersistentVolumeClaim"
    }
    for pod in all_pods():
        (container,) = containers(pod)
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in [*all_pods(), patched_pod()]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims
    for folder in (SERVING, LEARNING):
        made = yaml.safe_load((folder / "kustomization.yaml").read_text())
        files = {path.name for path in FILES if path.parent == folder}
        assert set(made["resources"]) - {"../serving"} == files - BY_HAND
        assert made["namespace"] == named("Namespace", "leadout")["metadata"]["name"]


def patched_pod() -> dict[str, Any]:
    (patch,) = resources(PATCH)
    pod: dict[str, Any] = patch["spec"]["template"]["spec"]
    return pod


def test_the_namespace_enforces_restricted_pod_security_and_the_pods_keep_it() -> None:
    labels = named("Namespace", "leadout")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert len(all_pods()) == 4
    for pod in all_pods():
        assert violations(pod) == []
        assert pod["automountServiceAccountToken"] is False
        (container,) = containers(pod)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        # With a root that cannot be written, these must be volumes.
        assert {"/tmp", "/home/leadout"} <= {
            each["mountPath"] for each in container["volumeMounts"]
        }
        assert IMAGE.fullmatch(container["image"])  # a tag can be moved to another image


def test_what_learning_changes_in_the_servers_keeps_it_too() -> None:
    pod = patched_pod()
    assert pod.keys() == {"containers", "volumes"}
    (container,) = pod["containers"]
    assert container.keys() == {"name", "args", "env", "volumeMounts"}
    assert container["name"] == named_container("Deployment", "leadout")["name"]


@pytest.mark.parametrize("folder", [SERVING, LEARNING], ids=lambda path: path.name)
def test_kustomize_makes_resources_that_keep_schema_and_pod_security(folder: Path) -> None:
    made = kustomized(folder)
    for each in made:
        kubernetes_validate.validate(each, "1.37", strict=True)
        assert [found for pod in pods_of(each) for found in violations(pod)] == []
        for pod in pods_of(each):
            (container,) = containers(pod)
            assert {mount["name"] for mount in container["volumeMounts"]} == {
                volume["name"] for volume in pod["volumes"]
            }
    assert {each["kind"] for each in made} >= {"Namespace", "Deployment", "NetworkPolicy"}


def container_change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda pod: containers(pod)[0]["securityContext"].update(fields)


def pod_change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda pod: pod["securityContext"].update(fields)


FORBIDDEN: dict[str, Callable[[dict[str, Any]], None]] = {
    "hostNetwork": lambda pod: pod.update(hostNetwork=True),
    "hostPID": lambda pod: pod.update(hostPID=True),
    "hostIPC": lambda pod: pod.update(hostIPC=True),
    "volumes: disk": lambda pod: pod["volumes"].append(
        {"name": "disk", "hostPath": {"path": "/var"}}
    ),
    "sysctls: kernel.msgmax": pod_change(sysctls=[{"name": "kernel.msgmax", "value": "1"}]),
    "privileged": container_change(privileged=True),
    "allowPrivilegeEscalation": container_change(allowPrivilegeEscalation=True),
    "capabilities.drop": container_change(capabilities={"drop": ["CHOWN"]}),
    "capabilities.add": container_change(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "hostPort": lambda pod: containers(pod)[0].update(ports=[{"hostPort": 80}]),
    "runAsNonRoot": pod_change(runAsNonRoot=None),
    "runAsUser": container_change(runAsUser=0),
    "seccompProfile": container_change(seccompProfile={"type": "Unconfined"}),
    "appArmorProfile": pod_change(appArmorProfile={"type": "Unconfined"}),
    "seLinuxOptions.type": pod_change(seLinuxOptions={"type": "spc_t"}),
    "seLinuxOptions.user or role": pod_change(seLinuxOptions={"user": "system_u"}),
    "procMount": container_change(procMount="Unmasked"),
    "windowsOptions.hostProcess": pod_change(windowsOptions={"hostProcess": True}),
}


@pytest.mark.parametrize("field", FORBIDDEN)
def test_the_check_of_pod_security_finds_what_is_forbidden(field: str) -> None:
    (pod,) = pods_of(named("Deployment", "leadout"))
    changed = copy.deepcopy(pod)
    FORBIDDEN[field](changed)
    assert violations(changed) == [field]
    init = copy.deepcopy(pod) | {"initContainers": [{"name": "setup"}]}
    assert set(violations(init)) == {"allowPrivilegeEscalation", "capabilities.drop"}


def named_container(kind: str, name: str) -> dict[str, Any]:
    (pod,) = pods_of(named(kind, name))
    (container,) = containers(pod)
    return container


def test_running_requests_have_the_time_that_is_promised() -> None:
    pod = named("Deployment", "leadout")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(arg.split("=") for arg in container["args"] if "=" in arg)
    drain = int(flags["--shutdown-timeout"])
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain > 0  # with 0, the default, vLLM aborts them
    assert pause >= 10
    assert pod["terminationGracePeriodSeconds"] >= drain + pause + 10


def test_keys_are_secrets_and_only_the_port_of_the_server_is_open() -> None:
    container = named_container("Deployment", "leadout")
    (key,) = [each for each in container["env"] if each["name"] == "VLLM_API_KEY"]
    assert "secretKeyRef" in key["valueFrom"]
    policy = named("NetworkPolicy", "leadout")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [container["ports"][0]["name"]]
    rest = named("NetworkPolicy", "leadout-nothing-else")["spec"]
    assert rest == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_no_environment_variable_holds_a_key_itself() -> None:
    for pod in [*all_pods(), patched_pod()]:
        for each in pod["containers"][0].get("env", []):
            assert "valueFrom" in each or not re.search("KEY|TOKEN|SECRET", each["name"])


def test_the_arguments_are_flags_of_ours() -> None:
    group: Any = typer.main.get_command(app)

    def flags_of(command: str) -> set[str]:
        found = group.commands[command]
        return {flag for each in found.get_params(typer.Context(found)) for flag in each.opts}

    def used(words: list[str]) -> set[str]:
        return {word.partition("=")[0] for word in words if word.startswith("--")}

    assert {"--draft", "--tuned"} <= flags_of("serve") & used(
        named_container("Deployment", "leadout")["args"]
    )
    patched = used(patched_pod()["containers"][0]["args"])
    ours = {"--registry", "--registry-key", "--capture", "--capture-rate", "--capture-key"}
    assert ours | {"--live"} <= flags_of("serve") & patched
    for kind, name in (
        ("Job", "leadout-check"),
        ("Job", "leadout-start"),
        ("CronJob", "leadout-learn"),
    ):
        command = named_container(kind, name)["command"]
        assert command[0] == "leadout"
        assert used(command) <= flags_of(command[1])


def test_a_learner_never_runs_twice_and_its_copies_of_traffic_end_with_it() -> None:
    job = named("CronJob", "leadout-learn")["spec"]
    assert job["concurrencyPolicy"] == "Forbid"
    (pod,) = pods_of(named("CronJob", "leadout-learn"))
    (container,) = containers(pod)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "emptyDir" in volumes[mounts["/work"]["name"]]
    assert "--work=/work" in container["command"]
    assert mounts["/traffic"]["readOnly"] is True


def test_the_learner_alone_has_the_key_that_signs() -> None:
    (learner,) = pods_of(named("CronJob", "leadout-learn"))
    (secret,) = [each["secret"] for each in learner["volumes"] if "secret" in each]
    assert secret["secretName"] == "leadout-learner"
    (secret,) = [each["secret"] for each in patched_pod()["volumes"] if "secret" in each]
    assert secret["secretName"] == "leadout-keys"
    assert {each["key"] for each in secret["items"]} == {"public.pem", "capture.key"}

"""Manifests keep Kubernetes' schema, fit each other, and ask for flags that exist."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from leadout.cli.app import app
from support.ops_files import OPS

KUBERNETES = OPS / "kubernetes"
FILES = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")


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


def test_volumes_are_there_and_the_kustomization_names_the_files() -> None:
    for kind, name in (("Deployment", "leadout"), ("Job", "leadout-check")):
        pod = named(kind, name)["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = pod["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes)
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert named("PersistentVolumeClaim", claim)
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in FILES} - {"check.yaml"}


def test_the_arguments_are_flags_of_ours() -> None:
    group: Any = typer.main.get_command(app)
    serve = group.commands["serve"]
    flags = {flag for option in serve.get_params(typer.Context(serve)) for flag in option.opts}
    args = named("Deployment", "leadout")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--draft", "--tuned"} <= flags & {arg.partition("=")[0] for arg in args}
    command = named("Job", "leadout-check")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "leadout"
    assert command[1] in group.commands

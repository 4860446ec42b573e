"""Templates that no container runs here: held to their schemas, and their commands to the programs they name."""

from __future__ import annotations

import asyncio
import copy
import re
import shlex
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from flows.deploy import AUTOMATIONS, HOME, automations_of, job_template

DEPLOY = HOME / "deploy"
KUBERNETES_VERSION = "1.31"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def test_compose_is_valid() -> None:
    """Red when compose.yaml is none by the Compose specification."""
    Draft7Validator(get_builtin_schema("vendor.compose-spec")).validate(compose())


def test_compose_has_no_default_password_and_is_open_to_this_machine_only() -> None:
    """Red when a secret is written down or may be empty, the server takes anyone, or a port is open to others."""
    file = compose()
    services = file["services"]
    secret = re.compile(r"PASSWORD|SECRET|AUTH|ACCESS_KEY|DATABASE_CONNECTION_URL")
    for name, service in services.items():
        for key, value in environment_of(service).items():
            if secret.search(key):
                assert re.search(r"\$\{\w+:\?[^}]+\}", value), f"{name}: {key} has a default or is written down"
                assert not re.search(r"\$\{\w+:-", value), f"{name}: {key}"
        for port in service.get("ports", []):
            assert str(port).startswith("127.0.0.1:"), f"{name}: {port}"
    server, worker = environment_of(services["server"]), environment_of(services["worker"])
    assert server["PREFECT_SERVER_API_AUTH_STRING"] == worker["PREFECT_API_AUTH_STRING"]
    devices = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
    for service in services.values():
        for needed in service.get("depends_on", {}):
            assert needed in services
    asked = set(re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose.yaml").read_text()))
    offered = set(re.findall(r"^(\w+)=$", (DEPLOY / "env.example").read_text(), re.M))
    assert asked <= offered, "env.example names what compose asks for, and gives none of it"


def rendered(**values: Any) -> dict[str, Any]:
    """The Job that a kubernetes worker would make for a run."""

    async def render() -> dict[str, Any]:
        configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(
            base_job_template=copy.deepcopy(job_template("kubernetes")), values=values
        )
        run = FlowRun(id=uuid4(), flow_id=uuid4(), name="tawny-owl")
        configuration.prepare_for_flow_run(run)
        return configuration.job_manifest

    return asyncio.run(render())


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("values", [{}, {"nodes": 4, "gpus": 8, "env": {"NCCL_DEBUG": "INFO"}, "working_dir": "/x"}])
def test_the_kubernetes_job_is_valid(values: dict[str, Any]) -> None:
    """Red when the Job that Prefect's worker makes of the template is none by Kubernetes' strict schema, or has no GPU,
    no shared memory or no rendezvous."""
    job = rendered(**values)
    pod = pod_of(job)
    # Prefect demands these two where Kubernetes knows and needs none; the API server drops them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == values.get("gpus", 1)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == values.get("nodes", 1)
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    given = {entry["name"] for entry in container["env"]}
    assert "PREFECT__FLOW_RUN_ID" in given
    assert set(values.get("env", {})) <= given
    assert not any(re.search("SECRET|PASSWORD|TOKEN", name) for name in given), "secrets come from the secret"
    script = container["command"][4]
    assert container["command"][:4] == ["tini", "--", "sh", "-c"]
    for name in ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"):
        assert name in script
    assert "29500" in script
    assert "{{" not in str(job)


def test_the_job_starts_the_engine_on_pod_0_and_joins_on_the_others(tmp_path: Path) -> None:
    """Red when the pods' shell script does not start Prefect's command on pod 0, or the rendezvous is another than pod
    0's name. Run by a real shell, with programs that say how they were called."""
    import subprocess

    (container,) = pod_of(rendered(nodes=2))["containers"]
    arguments = container["args"]
    arguments = shlex.split(arguments) if isinstance(arguments, str) else arguments
    for name in ("python", "prefect"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" rank $PET_NODE_RANK at $PET_MASTER_ADDR:$PET_MASTER_PORT\n')
        program.chmod(0o755)
    for index in (0, 1):
        said = subprocess.run(
            [*container["command"][2:], *arguments],
            env={"PATH": f"{tmp_path}:/bin:/usr/bin", "JOB_COMPLETION_INDEX": str(index),
                 "HOSTNAME": f"eyas-x7k2p-{index}"},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert f"rank {index} at eyas-x7k2p-0.eyas-rendezvous:29500" in said
        assert ("flows.join" in said) == (index == 1)
        if index == 0:
            assert shlex.join(arguments) in said


def test_the_kubernetes_setup_is_valid_and_fits_the_job() -> None:
    """Red when one of its objects is none by the strict schema, or the Job asks for another."""
    objects = {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "kubernetes-setup.yaml").read_text())}
    for found in objects.values():
        kubernetes_validate.validate(found, KUBERNETES_VERSION, strict=True)
    job = rendered()
    pod = pod_of(job)
    service = objects["Service"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["port"] == 29500
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "emptyDir" not in volume]
    assert claims == [objects["PersistentVolumeClaim"]["metadata"]["name"]]


def test_every_variable_of_the_job_template_is_used_and_explained() -> None:
    """Red when a variable changes nothing, or the form of the pool shows it without title or help."""
    template = job_template("kubernetes")
    used = set(re.findall(r"\{\{ (\w+) \}\}", str(template["job_configuration"])))
    properties = template["variables"]["properties"]
    assert used == set(properties)
    for name, field in properties.items():
        assert field["title"], name
        assert field["description"].endswith("."), name


def test_the_image_is_made_of_what_is_there() -> None:
    """Red when the Dockerfile copies what the checkout or the build context lacks, runs as root, or starts a program
    without an init that passes signals on."""
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if re.match(r"[A-Z]+ ", line)]
    allowed = {line[1:] for line in (HOME / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for word, rest in steps:
        if word == "COPY" and "--from" not in rest:
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            for source in sources:
                assert (HOME / source).exists(), source
                assert source in allowed, f"{source} is not in the build context"
    words = [word for word, _ in steps]
    assert dict(steps)["USER"] == "1000"
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "tini" in dict(steps)["ENTRYPOINT"]
    assert not [rest for word, rest in steps if word in ("ENV", "ARG") and re.search("PASSWORD|SECRET|TOKEN=", rest)]


def test_automations_are_prefects() -> None:
    """Red when one is none by Prefect's schema, the zombie's deadline is under three heartbeats, or it would notice
    the end of a run that went well."""
    automations = {automation["name"]: automation for automation in automations_of(AUTOMATIONS)}
    assert set(automations) == {"eyas-zombie-runs", "eyas-failure-notice", "eyas-promoted-draft"}
    trigger = automations["eyas-zombie-runs"]["trigger"]
    image = (DEPLOY / "Dockerfile").read_text()
    frequency = int(re.search(r"PREFECT_FLOWS_HEARTBEAT_FREQUENCY=(\d+)", image)[1])  # type: ignore[index]
    assert trigger["within"] >= 3 * frequency
    assert "prefect.flow-run.heartbeat" in trigger["after"]
    for end in ("Completed", "Failed", "Cancelled", "Crashed"):
        assert f"prefect.flow-run.{end}" in trigger["expect"]

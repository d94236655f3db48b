"""The manifests of deploy/kubernetes are valid, and say the same as the compose file.

The schemas are those that Kubernetes publishes. No cluster takes part.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from app.settings import Settings
from tests.security.compose_in_runc import services

JSON = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ["1.33", "1.37"]  # the oldest that takes all fields in use, and the newest
OVERLAYS = ["cpu", "cuda"]
DRAIN = "ROUNDHOUSE_DRAIN_S"
COMPOSED = services({"POSTGRES_PASSWORD": "secret"})["host"]


def read(file: Path) -> list[JSON]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def manifests() -> dict[str, JSON]:
    """Return each object of the folder by its file, without what only Kustomize reads."""
    found = {}
    for file in sorted(FOLDER.rglob("*.yaml")):
        if file.name != "kustomization.yaml" and file.parent.name not in OVERLAYS:
            [found[str(file.relative_to(FOLDER))]] = read(file)
    return found


MANIFESTS = manifests()


def host_set(overlay: str) -> JSON:
    """Return the stateful set with the patches of an overlay."""
    [kustomization] = read(FOLDER / overlay / "kustomization.yaml")
    patched = MANIFESTS["hosts/hosts.yaml"]
    for patch in kustomization.get("patches", []):
        assert patch["target"] == {"kind": "StatefulSet", "name": "host"}
        operations = yaml.safe_load((FOLDER / overlay / patch["path"]).read_text())
        patched = jsonpatch.apply_patch(patched, operations)
    return patched


def pod(overlay: str) -> JSON:
    return host_set(overlay)["spec"]["template"]["spec"]


def container(overlay: str) -> JSON:
    [found] = pod(overlay)["containers"]
    return found


def environment(overlay: str) -> dict[str, str]:
    """Return the variables of the device worker of pod `host-3`, in the order of their making."""
    known = {"metadata.name": "host-3", "status.podIP": "10.0.0.3", "spec.nodeName": "node-1"}
    found: dict[str, str] = dict(MANIFESTS["shared/settings.yaml"]["data"])
    for each in container(overlay)["env"]:
        field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        found[each["name"]] = known[field] if field else expanded(each["value"], found)
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as the kubelet does it in commands and in later variables."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", MANIFESTS)
def test_manifest_is_valid_and_has_no_unknown_field(file, version):
    kubernetes_validate.validate(MANIFESTS[file], version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_patched_stateful_set_is_valid(overlay, version):
    kubernetes_validate.validate(host_set(overlay), version, strict=True)


def test_manifest_with_an_unknown_field_is_refused():
    wrong = jsonpatch.apply_patch(
        MANIFESTS["hosts/hosts.yaml"],
        [{"op": "add", "path": "/spec/template/spec/hostUser", "value": False}],
    )
    with pytest.raises(kubernetes_validate.ValidationError, match="hostUser"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="renders with kubectl's Kustomize")
@pytest.mark.parametrize("folder", ["shared", *OVERLAYS])
def test_what_kustomize_makes_is_valid(folder):
    made = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True, check=True
    )
    objects = [each for each in yaml.safe_load_all(made.stdout) if each]
    assert {each["metadata"].get("namespace", "roundhouse-devices") for each in objects} == {
        "roundhouse-devices"
    }
    for each in objects:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("folder", ["shared", "hosts", *OVERLAYS])
def test_kustomization_names_the_files_of_its_folder(folder):
    [kustomization] = read(FOLDER / folder / "kustomization.yaml")
    patches = [each["path"] for each in kustomization.get("patches", [])]
    named = {*kustomization["resources"], *patches, "kustomization.yaml"} - {"../hosts"}
    assert named == {file.name for file in (FOLDER / folder).iterdir()}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_setting_of_a_device_worker_exists(overlay):
    names = {
        str(field.validation_alias or f"ROUNDHOUSE_{name}").upper()
        for name, field in Settings.model_fields.items()
    }
    set_ = environment(overlay).keys() - {"POD_NAME"}
    assert set_ <= names | {"ROUNDHOUSE_SECRETS"}
    assert not set_ & {"DATABASE_URL", "REDIS_URL", "ROUNDHOUSE_ISLAND_KEY"}


@pytest.mark.parametrize(("overlay", "devices"), [("cpu", ["--cpus", "1"]), ("cuda", [])])
def test_device_worker_runs_the_command_of_the_compose_file_with_its_own_names(overlay, devices):
    variables, its = environment(overlay), container(overlay)
    words = [expanded(word, variables) for word in its["command"] + its.get("args", [])]
    assert words == ["roundhouse", "worker", "--host", "host-3", *devices]
    assert words[:3] == COMPOSED["command"][:3]
    assert its["image"] == COMPOSED["image"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_variables_of_the_compose_file_are_all_there(overlay):
    of_others = {"ROUNDHOUSE_SECRETS_KEY"}  # names a file that the service has
    variables = environment(overlay)
    assert COMPOSED["environment"].keys() - of_others <= variables.keys()
    for name in ("ROUNDHOUSE_SANDBOX", "ROUNDHOUSE_SECRETS", "ROUNDHOUSE_REDIS_CA"):
        assert variables[name] == COMPOSED["environment"][name]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_has_no_rights_but_those_of_the_compose_file(overlay):
    its, own = pod(overlay), container(overlay)
    assert its["securityContext"]["runAsNonRoot"] is True
    user, group = COMPOSED["user"].split(":")
    assert str(its["securityContext"]["runAsUser"]) == user
    assert str(its["securityContext"]["runAsGroup"]) == group
    assert its["securityContext"]["seccompProfile"]["type"] == "Localhost"
    assert its["automountServiceAccountToken"] is False
    assert its["hostUsers"] is False  # without it the API refuses procMount
    assert own["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "procMount": "Unmasked",
    }
    text = json.dumps(its)
    assert not any(word in text for word in ("privileged", "hostPath", "hostNetwork", "hostPID"))
    assert own["resources"]["limits"]["memory"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_service_of_the_namespace_can_change_a_setting(overlay):
    # A service called `roundhouse` would set ROUNDHOUSE_PORT to tcp://ADDRESS:PORT.
    assert pod(overlay)["enableServiceLinks"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_has_more_time_to_drain_than_the_container_of_the_compose_file(overlay):
    grace_s = int(COMPOSED["stop_grace_period"].removesuffix("s"))
    assert pod(overlay)["terminationGracePeriodSeconds"] >= grace_s
    assert pod(overlay)["terminationGracePeriodSeconds"] > int(environment(overlay)[DRAIN])
    assert "preStop" not in json.dumps(container(overlay))  # SIGTERM alone is the drain


@pytest.mark.parametrize("probe", ["readinessProbe", "livenessProbe"])
def test_probe_asks_the_health_check_of_the_compose_file(probe):
    own = container("cpu")[probe]
    [*shell, command] = own["exec"]["command"]
    asked = [word for word in shlex.split(command) if word not in ("exec", "--alive")]
    assert shell == ["sh", "-c"]
    assert ["CMD", *asked] == COMPOSED["healthcheck"]["test"]
    assert ("--alive" in command) == (probe == "livenessProbe")
    assert importlib.util.find_spec(asked[asked.index("-m") + 1])
    assert own["timeoutSeconds"] > 5  # the time that the check gives Redis


def test_pod_has_all_gpus_of_a_node_and_images_of_each_fit_its_memory():
    limits, variables = container("cuda")["resources"]["limits"], environment("cuda")
    gpus = int(limits["nvidia.com/gpu"])
    assert gpus == 8
    defaults = Settings.model_fields
    tasks = defaults["residents_max"].default * defaults["resident_overhead_bytes"].default
    room = int(limits["memory"].removesuffix("Gi")) * 2**30
    assert gpus * (int(variables["ROUNDHOUSE_HOST_MEMORY_BYTES"]) + tasks) < room
    assert "nvidia.com/gpu" not in container("cpu")["resources"]["limits"]


def test_names_that_objects_give_each_other_agree():
    set_, labels = host_set("cpu")["spec"], {"app.kubernetes.io/name": "roundhouse-device"}
    assert set_["serviceName"] == MANIFESTS["hosts/service.yaml"]["metadata"]["name"]
    assert set_["template"]["metadata"]["labels"] == labels == set_["selector"]["matchLabels"]
    assert MANIFESTS["hosts/service.yaml"]["spec"]["selector"] == labels
    assert MANIFESTS["hosts/disruption.yaml"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["shared/network.yaml"]["spec"]["podSelector"]["matchLabels"] == labels
    its = pod("cpu")
    mounted = {each["name"]: each["mountPath"] for each in container("cpu")["volumeMounts"]}
    made = [each["name"] for each in its["volumes"]]
    made += [each["metadata"]["name"] for each in set_["volumeClaimTemplates"]]
    assert sorted(mounted) == sorted(made)
    variables = environment("cpu")
    assert variables["ROUNDHOUSE_HOME"] == f"{mounted['home']}/home"
    assert variables["ROUNDHOUSE_SECRETS"] == mounted["secrets"]
    config = container("cpu")["envFrom"][0]["configMapRef"]["name"]
    assert config == MANIFESTS["shared/settings.yaml"]["metadata"]["name"]


# --- the network ----------------------------------------------------------------------------------

DEVICE = {"app.kubernetes.io/name": "roundhouse-device"}
API = {"app.kubernetes.io/name": "roundhouse-api"}


def admits(policy: JSON, namespace: str, labels: JSON, port: int = 40_000) -> bool:
    """Say whether a policy lets this pod connect to the pods that it selects.

    The rules are those of the API reference: any rule and any of its peers may match, all parts of
    a peer must, and a peer without a namespaceSelector means the namespace of the policy.
    """
    names = {"kubernetes.io/metadata.name": namespace}

    def matches(selector: JSON, its: JSON) -> bool:
        assert selector.keys() <= {"matchLabels"}
        return selector.get("matchLabels", {}).items() <= its.items()

    def is_peer(peer: JSON) -> bool:
        assert peer
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        if "namespaceSelector" in peer:
            is_there = matches(peer["namespaceSelector"], names)
        else:
            is_there = namespace == policy["metadata"]["namespace"]
        return is_there and matches(peer.get("podSelector", {}), labels)

    return any(
        (not rule.get("from") or any(map(is_peer, rule["from"])))
        and (not rule.get("ports") or any(each["port"] == port for each in rule["ports"]))
        for rule in policy["spec"]["ingress"]
    )


@pytest.mark.parametrize(
    ("namespace", "labels", "is_admitted"),
    [
        ("roundhouse-devices", DEVICE | {"roundhouse/kind": "cpu"}, True),
        ("roundhouse", API, True),  # shells, forwarded ports, notebooks
        ("roundhouse-devices", {}, False),
        ("roundhouse-devices", API, False),
        ("default", API, False),
        ("default", DEVICE, False),
        ("roundhouse", {}, False),
        ("roundhouse", DEVICE, False),
    ],
)
def test_device_workers_take_connections_of_device_workers_and_the_api(
    namespace, labels, is_admitted
):
    policy = MANIFESTS["shared/network.yaml"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert admits(policy, namespace, labels) is is_admitted


def test_page_makes_each_secret_that_a_pod_needs():
    page = (ROOT / "docs" / "howto" / "kubernetes.md").read_text()
    volumes = [each["secret"]["secretName"] for each in pod("cpu")["volumes"] if "secret" in each]
    variables = [
        each["secretRef"]["name"] for each in container("cpu")["envFrom"] if "secretRef" in each
    ]
    assert volumes
    assert variables
    for name in volumes + variables:
        assert f"create secret generic {name}" in page
    assert pod("cpu")["securityContext"]["seccompProfile"]["localhostProfile"] in page

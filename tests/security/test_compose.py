"""The promises of docker-compose.yml, read from the file; `test_device_compose` runs it."""

from __future__ import annotations

import json

import pytest

from tests.security.compose_in_runc import NAMESPACES, ROOT, services

pytestmark = pytest.mark.security

SERVICES = services({"POSTGRES_PASSWORD": "secret"})
OURS = {name: each for name, each in SERVICES.items() if name != "postgres"}
DEVICES = {"host": SERVICES["host"]}


@pytest.mark.parametrize("name", OURS)
def test_a_container_has_no_rights_and_is_bounded(name):
    service = OURS[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["user"] == "1000:1000"
    assert service["mem_limit"]
    assert service["pids_limit"]


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_requires_its_sandbox_and_holds_no_password(name):
    environment = DEVICES[name]["environment"]
    assert environment["ROUNDHOUSE_SANDBOX"] == "required"
    assert not {"DATABASE_URL", "REDIS_URL", "ROUNDHOUSE_ISLAND_KEY"} & environment.keys()
    assert "seccomp=deploy/seccomp.json" in DEVICES[name]["security_opt"]


@pytest.mark.parametrize(
    ("volume", "seen_by"),
    [
        ("admin", {"migrate"}),
        ("island", {"secrets", "migrate", "island"}),
        ("for-api", {"secrets", "api"}),
        ("for-control", {"secrets", "control"}),
        ("for-island", {"secrets", "island"}),
        ("for-redis", {"secrets", "redis"}),
        ("for-device", {"secrets", *DEVICES}),
        ("run-local", {"secrets", *DEVICES}),
        ("store", {"api", "control", *DEVICES}),
    ],
)
def test_volume_is_mounted_only_where_it_is_needed(volume, seen_by):
    found = {
        name
        for name, service in SERVICES.items()
        if any(each.partition(":")[0] == volume for each in service.get("volumes", []))
    }
    assert found == seen_by


def test_only_devices_may_make_namespaces():
    own = {name for name, each in SERVICES.items() if "seccomp" in str(each.get("security_opt"))}
    assert own == set(DEVICES)


def test_the_seccomp_profile_is_a_list_of_what_is_allowed_with_its_reasons():
    profile = json.loads((ROOT / "deploy" / "seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert all(rule["action"] == "SCMP_ACT_ALLOW" for rule in profile["syscalls"])
    assert all(len(rule["comment"]) > 20 for rule in profile["syscalls"])
    allowed = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert allowed >= NAMESPACES - {"setns"}
    assert not allowed & {
        *("ptrace", "process_vm_readv", "bpf", "perf_event_open", "kexec_load", "init_module"),
        *("keyctl", "add_key", "request_key", "io_uring_setup", "io_setup", "memfd_secret"),
        *("open_by_handle_at", "name_to_handle_at", "setns", "mknod", "mknodat", "shmget"),
        *("msgget", "semget", "mq_open", "vmsplice", "reboot", "swapon", "syslog", "fsopen"),
    }

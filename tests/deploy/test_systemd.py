"""The unit of systemd that serves the devices of a host."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import pytest

from app.settings import Settings
from workers.device import host_worker

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "roundhouse-worker.service"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # names of settings have capitals
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def test_unit_runs_the_command_of_a_host(service):
    program, verb, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, verb) == ("roundhouse", "worker")
    assert host_worker._arguments(words).device == []  # all GPUs


def test_unit_waits_longer_than_a_drain_and_lets_the_worker_end_its_processes(service):
    name, _, value = service["Environment"].partition("=")
    assert name == "ROUNDHOUSE_DRAIN_S"
    assert float(service["TimeoutStopSec"]) > Settings(drain_s=float(value)).drain_s + 10
    assert service["KillMode"] == "mixed"


def test_unit_delegates_control_groups_and_restarts(service):
    assert service["Delegate"] == "yes"
    assert service["Restart"] == "always"

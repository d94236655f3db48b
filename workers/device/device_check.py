"""Finds the device of a worker at its start and tries it out; a worker without its device ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from app.settings import Settings
from workers.device.processes.zygote_handle import ROOT, zygote_environment
from workers.process.isolation.device_access import (
    DeviceAccess,
    FoundDevice,
    NoSuchDevice,
    find_access,
)
from workers.transfer.host_context import CannotServe

TRY_S = 180.0  # limit to import torch and to start the driver
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from workers.hardware.device_probe import main; main()"
)


def find_device(settings: Settings) -> FoundDevice:
    """Return the device that the settings name, after torch has used it.  Raises CannotServe."""
    kind = settings.device_kind
    try:
        if not _KIND.fullmatch(kind):
            raise NoSuchDevice(f"torch knows no kind of device that is called {kind!r}")
        access = find_access(
            kind, settings.accelerator, environ=os.environ, nodes=_nodes(settings.device_nodes)
        )
        return FoundDevice() if kind == "cpu" else _try_out(kind, access)
    except NoSuchDevice as error:
        raise CannotServe(f"cannot serve a device of kind {kind}: {error}") from None


def _nodes(listed: str) -> tuple[Path, ...]:
    nodes = tuple(Path(name) for name in filter(None, listed.split(",")))
    for node in nodes:
        if not node.is_absolute() or not node.exists():
            raise NoSuchDevice(f"ROUNDHOUSE_DEVICE_NODES names {node}, which is not there")
    return nodes


def _try_out(kind: str, access: DeviceAccess) -> FoundDevice:
    """Let torch look at the device in a process of its own, in the environment of residents."""
    command = [sys.executable, "-B", "-c", _BOOT.format(root=str(ROOT)), kind]
    done = subprocess.run(
        command,
        env=zygote_environment(access.variables),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TRY_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise NoSuchDevice(f"the trial of device {access.id} ended with: {told[0]}")
    found = json.loads(lines[-1])
    if "error" in found:
        named = ", ".join(f"{name}={value}" for name, value in sorted(access.variables.items()))
        raise NoSuchDevice(f"{found['error']} (with {named})")
    return FoundDevice(access=access, **found)

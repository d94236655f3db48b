"""Starts the worker of a host: finds the host's devices, names them, and becomes the Celery worker.

    roundhouse worker [--host NAME] [--cpus N] [--device KIND[:WHICH] ...]
    python -m workers.device.host_worker ...

Without a device it serves all GPUs of the host; a GPU that is divided gives its MIG instances.  The
devices are called NAME.0, NAME.1, ...  `run/host.json` of ROUNDHOUSE_HOME remembers the number of
each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.messaging import broker
from app.settings import settings
from workers.process.isolation.device_access import NoSuchDevice, all_cuda

_HOST = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _arguments(arguments)
    try:
        wanted = asked.device + ["cpu"] * asked.cpus or all_cuda(environ=os.environ)
    except NoSuchDevice as error:
        return _refuse(f"{error}")
    if not wanted:
        return _refuse(
            "this host has no GPU that the NVIDIA driver lists; name its devices: --cpus 2, or"
            " --device KIND:WHICH"
        )
    if not _HOST.fullmatch(asked.host):
        return _refuse(
            f"a host is named by small letters, digits and .-_; got --host {asked.host!r}"
        )
    numbers = numbered(wanted, settings().host_file, host=asked.host)
    devices = {f"{asked.host}.{number}": device for number, device in sorted(numbers.items())}
    told = ",".join(f"{name}={device}" for name, device in devices.items())
    sys.stdout.write(f"serving {told.replace(',', ', ')}\n")
    sys.stdout.flush()
    os.environ["ROUNDHOUSE_DEVICES"] = told
    os.execv(sys.executable, [sys.executable, "-m", *celery_words(asked.host, devices)])


def celery_words(host: str, devices: Iterable[str]) -> list[str]:
    """Return the command that serves the devices, after `python -m`."""
    queues = ",".join(map(broker.device_queue, [host, *devices]))
    words = ["celery", "-A", "workers.device.worker", "worker", "--pool", "threads", "-c", "2"]
    return [*words, "-Q", queues, "-n", f"host.{host}@%h", "-l", "WARNING"]


def numbered(wanted: Sequence[str], file: Path, *, host: str) -> dict[int, str]:
    """Give each device its number, and write down which devices the host has.

    A device keeps its number.  A new one takes the lowest that no device here has, so it takes the
    place of one that was replaced.  Devices that are named alike, as all those of the CPU are, take
    the numbers of their name in turn.
    """
    known: dict[int, str] = {}
    if file.exists():
        known = {int(n): device for n, device in json.loads(file.read_text())["known"].items()}
    found, new = dict[int, str](), list[str]()
    for device in wanted:
        its = (n for n, one in sorted(known.items()) if one == device and n not in found)
        if (number := next(its, None)) is None:
            new.append(device)
        else:
            found[number] = device
    for device in new:
        found[next(n for n in range(len(wanted)) if n not in found)] = device
    served = [f"{host}.{number}" for number in sorted(found)]
    _write(file, {"serves": served, "known": known | found})
    return found


def _write(file: Path, told: Mapping[str, Any]) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(told))
    draft.replace(file)


def _refuse(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return 2


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="roundhouse worker", description=__doc__)
    name = socket.gethostname().partition(".")[0].lower()
    parser.add_argument("--host", default=name, help=f"name of this host ({name})")
    parser.add_argument("--cpus", type=int, default=0, help="so many CPU devices")
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        type=_device,
        metavar="KIND[:WHICH]",
        help="cpu, or a device by UUID or index: cuda:0; may be repeated; default: all GPUs",
    )
    return parser.parse_args(arguments)


def _device(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*(:[^\s,]+)?", text):
        raise argparse.ArgumentTypeError(f"expected KIND or KIND:WHICH, got {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())

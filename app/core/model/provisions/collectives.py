"""Says by whose collectives the ranks of a task compute: the service's own, or torch's.

The *exact* engine sums through host memory in an order of its own: the bits are the same on any
number of devices, so a device may come or go.  The *native* engine hands each call to torch's own
backend, NCCL on CUDA and gloo on a CPU, so each rank needs a device of its own.  The two have
other bits from three ranks on, so nothing ever changes from one to the other by itself.
"""

from __future__ import annotations

from app.core.model.fields import Fields

EXACT, NATIVE = "exact", "native"
ENGINES = (EXACT, NATIVE)
#: by what a task runs: its need if its collectives are native, and the offer of a host
NEEDS = {"command": "native", "job": "native-job"}
KINDS = ("cpu", "cuda")  # kinds of devices for which torch has a backend that is used here


def read_collectives(fields: Fields, *, run_kind: str, world_size: int) -> str:
    """Read the field `collectives`."""
    engine: str = fields.one_of("collectives", ENGINES, EXACT)
    if engine != NATIVE:
        return engine
    if run_kind not in NEEDS:
        told = (
            f"must be {EXACT} for a {run_kind}: only commands and jobs use torch's own "
            "collectives. Leave the field out"
        )
        fields.fault("collectives", told)
    elif world_size == 1:
        told = f"is for several ranks; world_size is 1. Set world_size, or set it to {EXACT}"
        fields.fault("collectives", told)
    return engine


def check_devices(
    fields: Fields,
    world_size: int,
    *,
    least: int,
    most: int,
    kind: str,
    across_hosts: bool,
    hosts: int = 0,
) -> None:
    """Report devices that native ranks cannot have: from `least` to `most` of this kind."""
    out = f"or set `collectives: {EXACT}`, with which ranks may share a device"
    if not least == most == world_size:
        told = (
            f"must be {world_size}, one device for each rank, as min and max, since collectives "
            f"are {NATIVE}; {out}"
        )
        fields.fault("devices/min", told)
    elif kind not in KINDS:
        told = f"must be one of {', '.join(KINDS)}, since collectives are {NATIVE}; {out}"
        fields.fault("devices/kind", told)
    elif across_hosts:
        where, value = ("hosts", "1") if hosts else ("across_hosts", "false")
        told = f"must be {value}: ranks with {NATIVE} collectives are on one host; {out}"
        fields.fault(f"devices/{where}", told)

"""Reads on how many hosts the devices of a task lie, as many on each."""

from __future__ import annotations

from app.core.model.fields import Fields


def read_hosts(fields: Fields, *, most: int, why: str) -> tuple[int, bool]:
    """Read `hosts`, which is at most `most`, and `across_hosts`; the number is 0 if it is 1 or not
    given.

    A task on one host needs no number, and several hosts need no `across_hosts` in addition.
    """
    hosts = fields.integer("hosts", 0, least=1, most=most, why=why)
    across_hosts = fields.flag("across_hosts", hosts > 1)
    if hosts > 1 and not across_hosts:
        told = f"must be true, or left out, as hosts is {hosts}; or set hosts to 1"
        fields.fault("across_hosts", told)
    elif hosts == 1 and across_hosts:
        told = "must be more than 1 as across_hosts is true; or leave one of the two out"
        fields.fault("hosts", told)
    return (hosts if hosts > 1 else 0), across_hosts


def check_parts(fields: Fields, hosts: int, *, least: int, most: int) -> None:
    """Report devices that cannot be divided among the hosts, as many on each."""
    out = "or leave hosts out and set `across_hosts: true`, for any number of devices on each host"
    if least % hosts:
        fewer = least - least % hosts
        numbers = f"{fewer} or {fewer + hosts}" if fewer else str(hosts)
        told = (
            f"must be a multiple of hosts, as many devices on each; got min {least} and hosts "
            f"{hosts}. Set it to {numbers}, {out}"
        )
        fields.fault("min", told)
    elif most != least:
        told = (
            f"must be {least}, as min is: devices on {hosts} hosts do not change in number. Leave "
            f"it out, {out}"
        )
        fields.fault("max", told)

"""Says what of a sandbox's network a stored tree would lose, and waits until there is nothing.

CRIU stores what a TCP connection has sent and received. It drops what waits in other sockets of the
network unread, and sees no connection that the processes have closed or have not accepted yet. Such
moments are short. So a stopped tree runs on until there is none, and is stopped again.

The tables are those of the kernel, proc_net(5); their network must be that of the tree alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from workers.commands.freezer import Tree

_NET = Path("/proc/self/net")
_TCP, _DATAGRAMS = ("tcp", "tcp6"), ("udp", "udp6", "udplite", "udplite6", "icmp", "icmp6", "raw")
_CONNECTS, _LISTENS = "02", "0A"  # SYN_SENT, LISTEN
_HEARS = {"01", "04", "05"}  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2: the other end has not closed yet
_SENDS_THEN_CLOSES = {"04", "09", "0B"}  # FIN_WAIT1, LAST_ACK, CLOSING
_MAPPED = "0000000000000000FFFF0000"  # what a table of IPv6 has before an address of IPv4
_LOOK_AGAIN_S = 0.0005


def under_way(net: Path = _NET) -> str:
    """Return what a store at this moment would lose of the network; "" if nothing."""
    if not (net / "tcp").exists():
        return "its connections cannot be seen"
    if lost := _of_connections(net):
        return lost
    if any(int(fields[4].partition(":")[2], 16) for fields in _rows(net, _DATAGRAMS)):
        return "a datagram is not read yet"
    if any(fields[4] != "0" or fields[6] != "0" for fields in _rows(net, ("netlink",))):
        return "an answer of the kernel about its network is not read yet"
    return ""


def _of_connections(net: Path) -> str:
    """Return what would be lost of TCP: only what an end that a process has open could get."""
    closed, held = set[tuple[str, str]](), set[tuple[str, str]]()
    for fields in _rows(net, _TCP):
        (here, there), state, inode = map(_short, fields[1:3]), fields[3], fields[9]
        if state == _CONNECTS or (state == _LISTENS and int(fields[4].partition(":")[2], 16)):
            return "a connection between its processes is not accepted yet"
        if inode != "0" and state in _HEARS:
            held.add((here, there))
        elif inode == "0" and state in _SENDS_THEN_CLOSES:
            closed.add((there, here))
    if held & closed:
        return "a connection that one end has closed still has data under way"
    return ""


def settle(tree: Tree, freeze_within_s: float, within_s: float) -> bool:
    """Let a stopped tree run on until nothing is under way; False if there still is something.

    The tree is stopped again in any case; raises WontStop if it cannot be.
    """
    until_s = time.monotonic() + within_s
    while under_way():
        if time.monotonic() >= until_s:
            return False
        tree.thaw()
        time.sleep(_LOOK_AGAIN_S)
        while under_way() and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)
        tree.freeze(freeze_within_s)  # something new may be under way by now
    return True


def _short(address: str) -> str:
    return address.removeprefix(_MAPPED)


def _rows(net: Path, tables: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the rows of the tables that this kernel has, without their heads."""
    for table in tables:
        if (path := net / table).exists():
            with path.open(encoding="ascii") as file:
                next(file)
                yield from map(str.split, file)

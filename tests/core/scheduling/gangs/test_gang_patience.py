"""Tests of how many devices gangs hold whose patience has ended (rule F7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Policy,
    Snapshot,
)
from app.core.scheduling.board import Board

NOW_S = 1000.0
DEVICES = 8
POLICY = Policy(half_life_s=0.0, patience_s=10.0, wide_share=0.5)

#: Gangs, each on devices of its own: (width, time waited in s).
GANGS = {"wide": (4, 12.0), "narrow": (2, 15.0), "fresh": (2, 0.0)}

_changes = st.lists(
    st.one_of(
        st.tuples(st.just("device"), st.integers(0, DEVICES - 1), st.booleans()),
        st.tuples(st.just("gang"), st.sampled_from(sorted(GANGS)), st.booleans()),
    ),
    max_size=30,
)


def _device(number: int, cordoned: bool) -> BoardDevice:
    return BoardDevice(
        id=f"d{number}",
        host="h",
        kind="cpu",
        memory_bytes=8,
        lease_until_s=NOW_S + 99,
        cordoned=cordoned,
    )


def _gang(name: str, holds: bool) -> BoardTask:
    width, waited_s = GANGS[name]
    first = sum(GANGS[other][0] for other in sorted(GANGS) if other < name)
    seats = tuple(f"d{n}" for n in range(first, first + width))
    held: dict[str, Any] = {"state": "running", "epoch": 1, "seats": seats, "started_s": NOW_S}
    return BoardTask(
        id=name, request=name, tenant="a", user="a1", kind="cpu", width=width, tier="basic",
        submitted_s=0.0, waited_s=waited_s, **(held if holds else {"state": "waiting", "epoch": 0}),
    )  # fmt: skip


@given(_changes)
def test_devices_of_aged_gangs_after_any_changes_are_those_of_a_new_board(changes: list) -> None:
    seen = Snapshot(
        island="here",
        policy=POLICY,
        tenants={"a": BoardTenant(id="a", name="a", weight=1000)},
        users={"a1": BoardUser(id="a1", tenant="a", faded_us=0)},
        devices={f"d{n}": _device(n, False) for n in range(DEVICES)},
        tasks={name: _gang(name, False) for name in GANGS},
    )
    board = Board.of(seen, now_s=NOW_S)
    for what, which, so in changes:
        if what == "device":
            device = _device(which, so)
            seen = replace(seen, devices={**seen.devices, device.id: device})
            board.set_device(device)
        else:
            gang = _gang(which, so)
            seen = replace(seen, tasks={**seen.tasks, gang.id: gang})
            board.set_task(gang)
        anew = Board.of(seen, now_s=NOW_S)
        assert board.urgency.patience.aged("cpu") == anew.urgency.patience.aged("cpu")

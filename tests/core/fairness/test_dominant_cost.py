"""A task is charged by its own dominant resource: devices, or the memory that it reserves on them.

The examples have nine devices of 8 GB and one of 80 GB: 152 GB, and a device-second costs 1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.fairness.dominant_resource import dominant_cost
from app.core.model.snapshot import BoardDevice, BoardTask, BoardTenant, BoardUser, Policy, Snapshot
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from app.core.simulation.simulator import Arrival, Report, simulate

GB = 10**9
MIXED = [*(8 * GB for _ in range(9)), 80 * GB]


@pytest.mark.parametrize(
    ("cost", "memory_gb", "expected"),
    [
        (1000, 0, (1000, "devices")),
        (1000, 8, (1000, "devices")),  # 8/152 of the memory, a tenth of the devices
        (1000, 15.2, (1000, "devices")),  # a tenth of both: a tie
        (1000, 16, (1052, "memory")),  # 16/152 of what ten devices cost: 1052.6
        (1000, 80, (5263, "memory")),  # 80/152: more than a half
        (2000, 80, (5263, "memory")),
        (6000, 80, (6000, "devices")),
    ],
)
def test_larger_part_of_the_kind_decides_the_cost(
    cost: int, memory_gb: float, expected: tuple[int, str]
) -> None:
    found = dominant_cost(cost, int(memory_gb * GB), all_cost=10_000, all_memory_bytes=sum(MIXED))
    assert found == expected


def test_memory_costs_nothing_where_its_size_is_unknown() -> None:
    assert dominant_cost(1000, 80 * GB, all_cost=9000, all_memory_bytes=0) == (1000, "devices")


def devices(memories: list[int], cost: int = 1000) -> dict[str, BoardDevice]:
    return {
        f"d{n}": BoardDevice(id=f"d{n}", host="h", kind="cuda", memory_bytes=memory, cost=cost,
                        lease_until_s=1e9)
        for n, memory in enumerate(memories)
    }  # fmt: skip


def board_of(memories: list[int], *, memory_bytes: int, width: int = 1, cost: int = 1000) -> Board:
    task = BoardTask(
        id="t", request="t", tenant="a", user="a1", state="waiting", epoch=0, kind="cuda",
        memory_bytes=memory_bytes, width=width,
    )  # fmt: skip
    snapshot = Snapshot(
        island="isle",
        policy=Policy(half_life_s=0.0),
        tenants={"a": BoardTenant(id="a", name="a", weight=1000)},
        users={"a1": BoardUser(id="a1", tenant="a")},
        devices=devices(memories, cost),
        tasks={"t": task},
    )
    return Board.of(snapshot, now_s=0.0)


def test_launch_has_the_cost_of_memory_and_the_stay_is_charged_by_it() -> None:
    board = board_of(MIXED, memory_bytes=80 * GB)
    (launch,) = cycle(board).decisions
    assert (launch.devices, launch.cost) == (("d9",), 5263)
    assert (board.stays["t"].rate, board.tasks["t"].cost) == (5263, 5263)


def test_cost_of_a_running_task_stays_when_devices_come() -> None:
    board = board_of(MIXED, memory_bytes=80 * GB)
    cycle(board)
    board.set_device(replace(board.devices["d0"], id="d10", memory_bytes=80 * GB))
    board.set_task(replace(board.tasks["t"], state="running", started_s=0.0))
    assert board.stays["t"].rate == 5263
    anew = Board.of(
        Snapshot(island="isle", policy=board.policy, tenants=board.tenants, users=board.users,
                 devices=board.devices, tasks=board.tasks),
        now_s=0.0,
    )  # fmt: skip
    assert anew.stays["t"].rate == 5263


@given(
    count=st.integers(1, 50),
    memory=st.integers(1, 80 * GB),
    part=st.integers(0, 1000),
    cost=st.sampled_from([1, 333, 1000, 4000]),
    width=st.integers(1, 8),
)
def test_memory_is_never_charged_among_devices_of_one_size(
    count: int, memory: int, part: int, cost: int, width: int
) -> None:
    """So with one kind of equal devices every order is what it is without memory."""
    width = min(width, count)
    board = board_of([memory] * count, memory_bytes=memory * part // 1000, width=width, cost=cost)
    (launch,) = cycle(board).decisions
    assert launch.cost == 0
    assert board.stays["t"].rate == width * cost


# --- the shares that come of it -------------------------------------------------------------------


def run(memory: dict[str, int]) -> Report:
    arrivals = [
        Arrival(at_s=0, task=f"{tenant}.{n}", tenant=tenant, user=f"{tenant}1", work_s=1e7,
                kind="cuda", tier="basic", memory_bytes=bytes_)
        for tenant, bytes_ in memory.items()
        for n in range(4)
    ]  # fmt: skip
    return simulate(
        arrivals,
        devices([8 * GB, 80 * GB]).values(),
        [BoardTenant(id=name, name=name, weight=1000) for name in memory],
        Policy(half_life_s=0.0),
        until_s=2000.0,
        checked=False,
    )


def test_tenant_with_large_and_tenant_with_any_device_have_equal_dominant_shares() -> None:
    # Of 88 GB 80 are 10/11, of two devices one is a half: a second of the large device costs 20/11
    # to who needs its memory, and 1 to who does not.  a can use the large one only, for x of the
    # time; b has the small one, and the large one for 1 - x: 20/11 x = 1 + (1 - x), x = 22/31.
    report = run({"a": 80 * GB, "b": 0})
    assert report.device_s["a"] / 2000 == pytest.approx(22 / 31, abs=0.01)


def test_tasks_with_equal_memory_share_evenly() -> None:
    report = run({"a": 8 * GB, "b": 0})
    assert report.device_s["a"] == pytest.approx(report.device_s["b"], rel=0.01)

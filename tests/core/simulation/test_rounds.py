"""A replay makes a round only when something has changed or may change."""

from __future__ import annotations

from collections.abc import Iterator

from app.core.model.snapshot import BoardDevice, BoardTenant, Policy
from app.core.scheduling.cycle import cycle
from app.core.simulation.simulator import Arrival, Costs, World

SLICES_OF_5_S = {"half_life_s": 0, "slice_min_s": 5.0, "slice_max_s": 5.0}


def rounds_s(work: list[Arrival], devices: int, policy: Policy, costs: Costs) -> Iterator[float]:
    """Yield the instants of all rounds."""
    some = [BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(devices)]
    owners = [BoardTenant(id=id, name=id, weight=1000) for id in {each.tenant for each in work}]
    world = World(work, some, owners, policy, costs)
    while (at_us := world.next_us()) is not None:
        world.advance(at_us)
        yield world.now_s
        world.obey(cycle(world.board))


def test_timers_of_tasks_that_ended_or_started_ask_for_no_round() -> None:
    """The turn of the first task would end after 5 s, the gang's patience after 20 s."""
    work = [
        Arrival(at_s=0, task="first", tenant="a", user="a1", work_s=1),
        Arrival(at_s=0, task="gang", tenant="a", user="a1", work_s=50, width=2),
    ]
    policy = Policy(patience_s=20.0, **SLICES_OF_5_S)
    rounds = [*rounds_s(work, 2, policy, Costs())]
    assert {5.0, 20.0}.isdisjoint(rounds)
    assert rounds[-1] == 51.0


def test_end_that_a_pause_has_put_off_asks_for_no_round() -> None:
    """Without the pause, task a would have ended after 100 s."""
    work = [
        Arrival(at_s=0, task="a", tenant="a", user="a1", work_s=100),
        Arrival(at_s=1, task="b", tenant="b", user="b1", work_s=2),
    ]
    rounds = [*rounds_s(work, 1, Policy(**SLICES_OF_5_S), Costs(image_s=1.0))]
    assert 100.0 not in rounds
    assert rounds[-1] == 103.0

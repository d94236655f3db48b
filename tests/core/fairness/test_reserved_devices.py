"""Which devices go to which reservation: by random demands, beside Hall's theorem and a count."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, combinations

from app.core.fairness.reservation import Reserved, ReservedTime
from app.core.fairness.reserved_devices import Demand, matched
from tests.thoroughness import over_seeds

DEVICES = [f"d{n}" for n in range(6)]


def a_demand(chance: random.Random, id: str) -> Demand:
    among = frozenset(chance.sample(DEVICES, chance.randrange(1, len(DEVICES) + 1)))
    return Demand(id, chance.randrange(1, len(among) + 1), among)


def most_filled(demands: list[Demand]) -> int:
    """Return how many devices the demands can have together (Hall, König)."""
    each = range(len(demands) + 1)
    subsets = chain.from_iterable(combinations(demands, size) for size in each)
    missing = (
        sum(one.number for one in some) - len(frozenset().union(*(one.among for one in some)))
        for some in subsets
    )
    return sum(one.number for one in demands) - max(missing)


@over_seeds(range(500), at_once=100)
def test_as_many_devices_as_can_be_are_given_and_earlier_demands_are_filled_first(
    seed: int,
) -> None:
    chance = random.Random(seed)
    demands = [a_demand(chance, f"r{n}") for n in range(chance.randrange(1, 5))]
    before = {device: f"r{chance.randrange(5)}" for device in DEVICES if chance.random() < 0.5}
    found = matched(demands, before)
    counts, by_id = Counter(found.values()), {each.id: each for each in demands}
    assert all(device in by_id[id].among for device, id in found.items())
    assert all(counts[each.id] <= each.number for each in demands)
    assert counts.total() == most_filled(demands)
    for n in range(1, len(demands) + 1):  # who comes later takes nothing from who comes earlier
        first = Counter(matched(demands[:n]).values())
        assert first.total() == most_filled(demands[:n])
        assert first == Counter({id: matched_alone(demands, id) for id in first})
    assert matched(demands, found) == found


def matched_alone(demands: list[Demand], id: str) -> int:
    return Counter(matched(demands).values())[id]


def test_a_device_stays_where_it_was_unless_another_demand_needs_it() -> None:
    either, first = Demand("either", 1, frozenset({"d0", "d1"})), Demand("d0", 1, frozenset({"d0"}))
    assert matched([either], {"d1": "either"}) == {"d1": "either"}
    assert matched([either, first], {"d0": "either"}) == {"d1": "either", "d0": "d0"}
    assert matched([either], {"d0": "gone"}) == {"d0": "either"}


@over_seeds(range(1000), at_once=100)
def test_certain_devices_are_never_promised_twice_and_what_fits_is_not_refused(seed: int) -> None:
    chance, has, accepted = random.Random(seed), {"cpu": len(DEVICES)}, list[ReservedTime]()
    for n in range(chance.randrange(9)):
        begins = chance.randrange(20)
        wanted = ReservedTime(begins, begins + chance.randrange(1, 9), {"cpu": 0}, {})
        demand = a_demand(chance, f"r{n}")
        named = {"cpu": demand} if chance.random() < 0.7 else {}
        wanted = wanted._replace(devices={"cpu": demand.number}, named=named)
        fits = all(is_possible([*accepted, wanted], at) for at in range(30))
        assert (Reserved.of(accepted).shortage([wanted], has) is None) == fits
        free = [at for at in range(30) if is_possible([*accepted, _at(wanted, at)], at)]
        lasting = wanted._replace(begins_us=0, ends_us=30)
        times = Reserved.of(accepted).free_times(lasting, has, lasting_us=1)
        assert [at for first, last in times for at in range(first, last)] == free
        accepted += [wanted] if fits else []


def _at(time: ReservedTime, at: int) -> ReservedTime:
    return time._replace(begins_us=at, ends_us=at + 1)


def is_possible(times: list[ReservedTime], at: int) -> bool:
    now = [each for each in times if each.begins_us <= at < each.ends_us]
    everyone = frozenset(DEVICES)
    demands = [
        each.named.get("cpu", Demand(f"any{n}", each.devices["cpu"], everyone))
        for n, each in enumerate(now)
    ]
    return most_filled(demands) == sum(each.number for each in demands)

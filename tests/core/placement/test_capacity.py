"""What a tenant may count on of an island: its part of the devices, and when they are free."""

from __future__ import annotations

from fractions import Fraction

from app.core.model.snapshot import BoardTenant
from app.core.placement.capacity import Stock

S = 10**9
TENANTS = {
    "a": BoardTenant(id="a", name="a", weight=1000),
    "b": BoardTenant(id="b", name="b", weight=3000),
    "b1": BoardTenant(id="b1", name="b1", weight=1000, parent="b"),
    "b2": BoardTenant(id="b2", name="b2", weight=1000, parent="b"),
    "sure": BoardTenant(id="sure", name="sure", weight=1, guarantee={"cpu": 2}),
}


def stock(devices: int = 4, **queued_s: int) -> Stock:
    found = Stock(kind="cpu", devices=devices)
    for tenant, seconds in queued_s.items():
        found.add(tenant, seconds * S, TENANTS)
    return found


def found(stock: Stock, tenant: str, seconds: int) -> tuple[int, float]:
    """(devices to count on, seconds until they are free)"""
    room = stock.room(tenant, seconds * S, TENANTS)
    return room.share, room.busy_ns / S


def test_tenant_alone_counts_on_all_devices_and_waits_for_nothing() -> None:
    assert found(stock(), "a", 10) == (4, 0)


def test_own_queue_drains_at_the_speed_of_the_tenants_share() -> None:
    assert found(stock(a=40), "a", 8) == (4, 10)  # 48 s of work on 4 devices, 2 s of them its new


def test_weights_divide_devices_among_tenants_with_work() -> None:
    assert stock(b1=9).part("a", TENANTS) == 1  # 1 : 3 of 4 devices
    assert stock(a=9).part("b1", TENANTS) == 3
    assert stock(a=9, b2=9).part("b1", TENANTS) == Fraction(3, 2)  # half of what is b's


def test_tenant_with_less_than_one_device_is_delayed_accordingly() -> None:
    # A quarter of the device: 10 s of work end after 40 s, so they begin, as it were, after 30.
    assert found(stock(devices=1, b1=1000), "a", 10) == (1, 30)


def test_queue_of_others_delays_no_longer_than_it_lasts() -> None:
    assert found(stock(devices=1, b1=5), "a", 10) == (1, 5)


def test_guaranteed_devices_count_whatever_the_weight() -> None:
    assert found(stock(a=1000), "sure", 10) == (2, 0)
    assert found(stock(devices=1, a=1000), "sure", 10) == (1, 0)

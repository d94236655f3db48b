"""Passes the orders of the island on to the device's machine."""

from __future__ import annotations

from app.core.device.device_events import OrderCame
from app.core.model.protocol.messages import Launch, Order
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.storing import ResultStore


class OrderDesk:
    """Receives the orders of the island; an old or repeated order changes nothing."""

    def __init__(self, stays: DeviceStays, storing: ResultStore) -> None:
        self.stays = stays
        self.storing = storing

    def receive(self, order: Order) -> None:
        if isinstance(order, Launch) and self.stays.machine.accepts(order):
            order = self.storing.with_newest_image(order)
        self.stays.give(OrderCame(order=order))

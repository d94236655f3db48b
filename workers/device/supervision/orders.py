"""Passes the orders of the island on to the device's machine."""

from __future__ import annotations

from app.core.device.device_events import OrderCame
from app.core.model.protocol.messages import Launch, Order
from workers.device.stays.lives import DeviceLives
from workers.device.stays.storing import ResultStore


class OrderDesk:
    """Receives the orders of the island; an old or repeated order changes nothing."""

    def __init__(self, lives: DeviceLives, storing: ResultStore) -> None:
        self.lives = lives
        self.storing = storing

    def receive(self, order: Order) -> None:
        if isinstance(order, Launch) and self.lives.machine.accepts(order):
            order = self.storing.with_newest_image(order)
        self.lives.give(OrderCame(order=order))

"""Changes wake those who wait, in each API process."""

from __future__ import annotations

import asyncio

from sqlalchemy import Engine

from app.messaging.live_updates import Changes
from tests.serving import PATIENT_S


def test_change_of_one_process_wakes_the_waiters_of_another(engine: Engine) -> None:
    here, there = Changes(), Changes()

    async def is_woken() -> bool:
        with there.subscribe("req_1") as news:
            there.start(engine, processes=2)
            assert await news.wait(PATIENT_S), "it does not listen"
            here.tell("ten_1", "req_1")
            return await news.wait(PATIENT_S)

    here.start(engine, processes=2)
    try:
        assert asyncio.run(is_woken())
    finally:
        here.stop()
        there.stop()

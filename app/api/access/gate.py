"""Admits as many calls at once as there are database connections; tenants take turns.

An admitted call may hold a thread and a connection.  A waiting call holds neither.  So admitted
calls always get both, and a flood of one tenant delays another tenant by a few calls at most.  A
call that is not admitted within WAIT_S is rejected (503, `Retry-After`).

A connection is held within one piece of work of one thread: `GatedRoute` runs an endpoint, checks
its result, commits and returns the connection without leaving the thread.  An `async` endpoint
holds no connection itself; it does each read with `in_thread`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, TypeVar

from anyio.lowlevel import RunVar
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import ResponseValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from app.api.access import rate_limiting
from app.db.guarded_connection import is_conflict
from app.db.transactions import POOL_SIZE, POOL_WAIT_S, close_session, forget_acts, released
from app.errors import Unavailable

WAIT_S = POOL_WAIT_S
TRIES = 3  # of a call whose transaction met a deadlock; nothing of a failed try remains
SHARE = POOL_SIZE // 2  # most calls of one tenant at once

Result = TypeVar("Result")


class Gate:
    """Admits the calls of one event loop. `whose` is a tenant, or the address of an unknown
    caller.
    """

    def __init__(self, width: int = POOL_SIZE, share: int = SHARE) -> None:
        self.width, self.share = width, share
        self._inside: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def entered(self, whose: str, wait_s: float | None = None) -> AsyncIterator[None]:
        """Hold an admission during the context; raises Unavailable after `wait_s`, or WAIT_S."""
        await self._enter(whose, WAIT_S if wait_s is None else wait_s)
        try:
            yield
        finally:
            self._leave(whose)

    async def _enter(self, whose: str, wait_s: float) -> None:
        if whose not in self._waiting and self._has_room(whose):
            self._inside[whose] += 1
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(admitted)
        try:
            async with asyncio.timeout(wait_s):
                await admitted
        except BaseException as error:
            self._give_up(whose, admitted)
            if isinstance(error, TimeoutError):
                detail = (
                    f"the service is busy: no slot for this call within {wait_s:g} s; try again"
                )
                raise Unavailable(detail) from None
            raise

    def _has_room(self, whose: str) -> bool:
        return self._inside.total() < self.width and self._inside[whose] < self.share

    def _give_up(self, whose: str, admitted: asyncio.Future[None]) -> None:
        if admitted.done() and not admitted.cancelled():
            self._leave(whose)
        elif (queue := self._waiting.get(whose)) is not None and admitted in queue:
            queue.remove(admitted)
            if not queue:
                del self._waiting[whose]

    def _leave(self, whose: str) -> None:
        self._inside[whose] -= 1
        if not self._inside[whose]:
            del self._inside[whose]
        while (whose_turn := self._next()) is not None:
            self._admit(whose_turn)

    def _next(self) -> str | None:
        """Return the tenant that was served longest ago, among those that wait and may have one
        more call.
        """
        return next((whose for whose in self._waiting if self._has_room(whose)), None)

    def _admit(self, whose: str) -> None:
        queue = self._waiting[whose]
        admitted = queue.popleft()
        self._waiting.move_to_end(whose)
        if not queue:
            del self._waiting[whose]
        if not admitted.done():  # otherwise the wait was cancelled at this moment
            self._inside[whose] += 1
            admitted.set_result(None)


_gate: RunVar[Gate] = RunVar("gate")


def gate() -> Gate:
    """Return the gate of the running event loop."""
    found = _gate.get(None)
    if found is None:
        found = Gate()
        _gate.set(found)
    return found


async def in_thread(
    whose: str, act: Callable[..., Result], *given: Any, wait_s: float | None = None
) -> Result:
    """Run `act` in a thread once it is this caller's turn; raises Unavailable as `entered` does."""
    async with gate().entered(whose, wait_s):
        return await run_in_threadpool(act, *given)


class GatedRoute(APIRoute):
    """Runs a plain `def` endpoint when it is the caller's turn, after its body has arrived."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        self.is_gated = not inspect.iscoroutinefunction(endpoint)
        super().__init__(
            path, self._within_one_hop(endpoint) if self.is_gated else endpoint, **more
        )

    def _within_one_hop(self, endpoint: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(endpoint)
        def run(**given: Any) -> Any:
            session = next((one for one in given.values() if isinstance(one, Session)), None)
            if session is None:
                return endpoint(**given)
            for _ in range(TRIES - 1):
                try:
                    with released(session):
                        return self._checked(endpoint(**given))
                except DBAPIError as error:
                    if not is_conflict(error):
                        raise
                    forget_acts(session)
            with released(session):
                return self._checked(endpoint(**given))

        return run

    def _checked(self, answer: Any) -> Any:
        """Build the model of the answer here, while rows can still be read; FastAPI then sends it
        unchanged.
        """
        if self.response_field is None or isinstance(answer, Response):
            return answer
        value, faults = self.response_field.validate(answer, {}, loc=("response",))
        if faults:
            raise ResponseValidationError(errors=faults, body=answer)
        return value

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_in_turn(request: Request) -> Response:
            try:
                if not self.is_gated:
                    return await handle(request)
                await read_body(request)
                async with gate().entered(rate_limiting.whose(request)):
                    return await handle(request)
            finally:
                await close_session(request)

        return handle_in_turn


async def read_body(request: Request) -> None:
    """Read the whole body; Starlette keeps it for later readers."""
    try:
        await request.body()
    except ClientDisconnect as error:
        raise HTTPException(400, "the body is incomplete") from error

"""The API process: combines the routers, the pages and the middleware.

    uvicorn app.main:app --http app.api.http_protocol:BoundedProtocol --timeout-graceful-shutdown 3

This module makes no decision and reads no data.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from app.api import documentation, openapi, probes, problems
from app.api import metrics as metric_routes
from app.api.access import auth
from app.api.access.scoped import operation_id
from app.api.middleware import AtOnce, BodyLimit, KnownHosts, RequestId
from app.api.routes import audit as audit_routes
from app.api.routes import budgets as budget_routes
from app.api.routes import bundles as bundle_routes
from app.api.routes import channels as channel_routes
from app.api.routes import checkpoints as checkpoint_routes
from app.api.routes import datablocks as datablock_routes
from app.api.routes import devices as device_routes
from app.api.routes import environments as environment_routes
from app.api.routes import folders as folder_routes
from app.api.routes import graphs as graph_routes
from app.api.routes import mounts as mount_routes
from app.api.routes import presets as preset_routes
from app.api.routes import requests as request_routes
from app.api.routes import reservations as reservation_routes
from app.api.routes import running_files as running_file_routes
from app.api.routes import secrets as secret_routes
from app.api.routes import shares as share_routes
from app.api.routes import simulations as simulation_routes
from app.api.routes import streams
from app.api.routes import tasks as task_routes
from app.api.routes import tenant_work as tenant_work_routes
from app.api.routes import tenants as tenant_routes
from app.api.routes import tunnels as tunnel_routes
from app.api.routes import webhooks as webhook_routes
from app.db import gc_freeze
from app.db.transactions import bound_waits, engine, transaction
from app.insight import explain
from app.messaging.live_updates import changes
from app.pages import site
from app.settings import settings

log = logging.getLogger(__name__)


def create_app() -> FastAPI:
    app = FastAPI(
        title="Roundhouse",
        version="1",
        summary="Runs the torch jobs of many teams on a few shared devices, and loses no step.",
        description=probes.INTRODUCTION,
        openapi_tags=probes.TAGS,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=operation_id,
        lifespan=_lifespan,
        webhooks=webhook_routes.sent,
    )
    problems.install(app)
    for router in _routers():
        app.include_router(router)
    openapi.install(app)
    documentation.mount(app)
    site.mount(app)
    app.add_middleware(BodyLimit, limit_of=_body_limit)
    app.add_middleware(AtOnce)
    app.add_middleware(KnownHosts, hosts=lambda: settings().hosts)
    app.add_middleware(RequestId)
    app.add_middleware(metric_routes.Measured)  # added last, so it comes first
    return app


def _routers() -> list[Any]:
    return [
        request_routes.router,
        streams.router,
        task_routes.router,
        tunnel_routes.router,
        tunnel_routes.sockets,
        running_file_routes.router,
        checkpoint_routes.router,
        bundle_routes.router,
        graph_routes.router,
        datablock_routes.router,
        share_routes.router,
        simulation_routes.router,
        tenant_routes.tenants,
        tenant_routes.users,
        tenant_work_routes.router,
        budget_routes.router,
        reservation_routes.router,
        webhook_routes.router,
        channel_routes.router,
        secret_routes.router,
        device_routes.router,
        preset_routes.router,
        mount_routes.router,
        folder_routes.router,
        environment_routes.router,
        audit_routes.router,
        probes.router,
        metric_routes.router,
        problems.router,
    ]


FOLDER_LIST_BYTES = 16 * 2**20  # the longest paths of all files of a folder fit


def _body_limit(path: str) -> int:
    if re.fullmatch(r"/v1/bundles/[^/]+", path):
        return settings().bundle_limit_bytes
    if re.fullmatch(r"/v1/(datablocks|files)/[^/]+", path):
        return settings().datablock_limit_bytes
    if re.fullmatch(r"/v1/datablocks/[^/]+/folder", path):
        return FOLDER_LIST_BYTES
    return settings().body_limit_bytes


# --- while it runs ------------------------------------------------------------------------------


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    gc_freeze.spare()
    _end_with_parent()
    bound_waits()
    changes.start(engine(), processes=settings().api_processes)
    warming = asyncio.create_task(run_in_threadpool(_warm))
    stopping = asyncio.Event()
    writing = asyncio.create_task(_write_uses(stopping))
    try:
        with _streams_ended_by_signals():
            yield
    finally:
        stopping.set()
        await warming
        await writing
        await run_in_threadpool(changes.stop)
        await run_in_threadpool(engine().dispose)


def _end_with_parent() -> None:
    """End this process when its parent has died, which started it as a worker (`uvicorn
    --workers`).
    """
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="parent", daemon=True).start()


def _warm() -> None:
    try:
        with transaction() as session:
            explain.warm(session)
    except SQLAlchemyError as error:
        log.warning(
            "could not preload queue explanations; the first request will be slow: %s", error
        )


async def _write_uses(stopping: asyncio.Event) -> None:
    """Record, now and then and once more at the end, when keys were used.

    The task is not cancelled: its thread would continue, with a connection from a pool that is
    closed already.
    """
    while not stopping.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), auth.USES_EVERY_S)
        await run_in_threadpool(_write_uses_once)


def _write_uses_once() -> None:
    try:
        auth.write_uses()
    except SQLAlchemyError as error:
        log.warning("could not record when keys were last used: %s", error)


class _streams_ended_by_signals:
    """Ends open streams when a signal arrives, because uvicorn waits for them before it ends the
    lifespan.
    """

    def __enter__(self) -> None:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._end)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _end(self, number: int, frame: Any) -> None:
        changes.close()
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


app = create_app()

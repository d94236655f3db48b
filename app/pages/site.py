"""Adds the pages to the service. Every answer carries the content policy below, including /docs."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import AppError
from app.pages import (
    admin_views,
    channel_views,
    comparison_views,
    log_views,
    operator_views,
    request_list,
    rerun_views,
    reservation_views,
    secret_views,
    sign_in,
    task_forms,
    tenant_views,
    views,
)

# Only images may be inlined, as the style sheet of the vendored Swagger UI does.
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


def mount(app: FastAPI) -> None:
    """Add the pages under /ui/, their files under /static/, and the content policy."""
    app.mount("/static", StaticFiles(directory=views.STATIC), name="static")
    for router in routers():
        app.include_router(router)
    app.add_exception_handler(views.NotSignedIn, views.to_sign_in)
    for failure in (HTTPException, DBAPIError, PoolTimeout, Exception):
        answer = app.exception_handlers[failure]
        app.add_exception_handler(failure, views.for_browsers(answer))
    for kind in (AppError, RequestValidationError):
        app.add_exception_handler(kind, views.refused)
    app.add_middleware(ContentPolicy)


def routers() -> list[APIRouter]:
    """Return the routers in matching order: the very last route takes all other addresses."""
    return [
        sign_in.router,
        task_forms.router,
        admin_views.router,
        channel_views.router,
        comparison_views.router,
        log_views.router,
        operator_views.router,
        request_list.router,
        rerun_views.router,
        reservation_views.router,
        secret_views.router,
        tenant_views.router,
        views.router,
    ]


class ContentPolicy:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("Content-Security-Policy", POLICY)
            await send(message)

        await self.app(scope, receive, send_with_policy if scope["type"] == "http" else send)

"""The tenant's web pages: server-rendered, live, and with nothing from another origin.

Their numbers are those of `app.reports`, as the API's are.  Pages change nothing but who is signed
in.  Every answer of the whole service carries the policy below, /docs too.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"

# Images may be inlined, as the vendored Swagger UI's style sheet does; nothing else may.
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


def mount(app: FastAPI) -> None:
    """Add the pages under /ui/, their files under /static/, and the content policy."""
    from app.pages import views

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.include_router(views.router)
    app.add_exception_handler(views.NotSignedIn, views.to_the_door)
    app.add_middleware(ContentPolicy)


class ContentPolicy:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("Content-Security-Policy", POLICY)
            await send(message)

        await self.app(scope, receive, send_with_policy if scope["type"] == "http" else send)

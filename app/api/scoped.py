"""A route knows its operation's name and which scope a key must have for it."""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute

from app.api.gate import GatedRoute
from app.core.scope import AREAS


def operation_id(route: APIRoute) -> str:
    return operation_named(route.name)


def operation_named(name: str) -> str:
    """`cancel_task` is cancelTask."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class ScopedRoute(GatedRoute):
    """Knows which scope a key must have for it; None: any key will do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.needs_scope = _scope(self)
        self.openapi_extra = {**(self.openapi_extra or {}), "x-scope": self.needs_scope}


#: Anybody may ask who they are; these look, although they take a body.
_OF_ANYBODY = frozenset({"get_me"})
_LOOKING = frozenset({"validate_request", "simulate"})


def _scope(route: APIRoute) -> str | None:
    if route.name in _OF_ANYBODY:
        return None
    [tag] = route.tags
    looks = route.name in _LOOKING or bool(route.methods & {"GET", "HEAD"})
    return f"{AREAS[str(tag)]}:{'read' if looks else 'write'}"

"""Defines routes that know their operation id and the scope that a key needs for them."""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute

from app.api.access.gate import GatedRoute
from app.core.security.scopes import AREAS

#: What a call may authenticate with; `app.api.openapi` says what each is.
SECURITY: list[dict[str, list[str]]] = [{"key": []}, {"session": []}]


def operation_id(route: APIRoute) -> str:
    return operation_named(route.name)


def operation_named(name: str) -> str:
    """Convert a function's name to an operation id: `cancel_task` becomes cancelTask."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class ScopedRoute(GatedRoute):
    """A route with `needs_scope`, the scope that a key needs for it. None means that any key will
    do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.needs_scope = _scope(self)
        shown = {"security": SECURITY, "x-scope": self.needs_scope}
        self.openapi_extra = {**(self.openapi_extra or {}), **shown}


#: Operations that any caller may use, such as asking for one's own identity. The routes in _LOOKING
#: only read, although they take a body.
_OF_ANYBODY = frozenset({"get_me"})
_LOOKING = frozenset({"validate_request", "simulate"})


def _scope(route: APIRoute) -> str | None:
    if route.name in _OF_ANYBODY:
        return None
    [tag] = route.tags
    looks = route.name in _LOOKING or not {"GET", "HEAD"}.isdisjoint(route.methods or ())
    return f"{AREAS[str(tag)]}:{'read' if looks else 'write'}"

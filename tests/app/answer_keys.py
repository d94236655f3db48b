"""Finds what an answer of the API has beside the fields of its model.

Pydantic leaves such keys out without a word, so a misspelt one is an answer with a default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin
from unittest import mock

from fastapi import routing
from pydantic import BaseModel

from app.api.schemas.base import Out


def unknown_keys(model: Any, value: Any, where: str = "") -> Iterator[str]:
    """Yield each key of the value, at all levels, that the model does not have."""
    origin, inner = get_origin(model), get_args(model)
    if origin is Annotated:
        yield from unknown_keys(inner[0], value, where)
    elif origin in (Union, UnionType):
        found = [[*unknown_keys(one, value, where)] for one in inner if one is not type(None)]
        yield from min(found, key=len)
    elif isinstance(value, Mapping) and isinstance(model, type) and issubclass(model, BaseModel):
        fields = model.model_fields
        yield from (f"{where}/{name}" for name in value.keys() - fields.keys())
        for name in value.keys() & fields.keys():
            yield from unknown_keys(fields[name].annotation, value[name], f"{where}/{name}")
    elif isinstance(value, Mapping) and origin is dict:
        for name, one in value.items():
            yield from unknown_keys(inner[1], one, f"{where}/{name}")
    elif isinstance(value, (list, tuple)) and origin in (list, tuple):
        for one in value:
            yield from unknown_keys(inner[0], one, f"{where}/*")


def _check(model: Any, value: Any) -> None:
    found = [*unknown_keys(model, value)]
    assert not found, f"{model} has no field {', '.join(found)}"


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Refuse answers with keys that their models do not have, while this lasts."""
    serialize = routing.serialize_response

    async def serialized(*, field: Any = None, response_content: Any, **how: Any) -> Any:
        if field is not None:
            _check(field.field_info.annotation, response_content)
        return await serialize(field=field, response_content=response_content, **how)

    def validated(model: type[Out], value: Any, **how: Any) -> Any:
        _check(model, value)
        return BaseModel.model_validate.__func__(model, value, **how)  # type: ignore[attr-defined]

    with (
        mock.patch.object(routing, "serialize_response", serialized),
        mock.patch.object(Out, "model_validate", classmethod(validated)),
    ):
        yield

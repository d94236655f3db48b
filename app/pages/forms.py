"""Handles forms on pages: the proof that our page sent a form in this session, and the message
afterwards.

A form carries a token that is made from the session's cookie and that no other site can read. The
cookie is SameSite, and the browser reports the origin of the sending page. The message of the next
page travels in a cookie signed with the same key, so that no other site can set it. None of this is
stored on the server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Form, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ValidationError

from app.api.access.auth import COOKIE, from_our_origin
from app.errors import BadInput, Forbidden, StaleVersion


def text(value: str) -> str:
    if "\x00" in value:
        raise ValueError("holds a NUL")
    return value


Field = Annotated[str, Form(), AfterValidator(text)]
Body = TypeVar("Body", bound=BaseModel)
Choice = TypeVar("Choice")

TOLD = "roundhouse_told"
TOLD_FOR_S = 60  # lifetime in s; a page that is opened later shows no message


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The result of a form, in words; `secret` is shown with it, only once."""

    words: str
    secret: str = ""


# --- proof of origin ----------------------------------------------------------------------------


def token(cookie: str) -> str:
    return _mac(cookie, "form")


def check(request: Request, token: Annotated[str, Form()] = "") -> None:
    """Raise Forbidden unless a page of this session has sent the form. It is a dependency of
    routes.
    """
    cookie = request.cookies.get(COOKIE, "")
    if not from_our_origin(request):
        raise Forbidden("a form is sent from a page of this service")
    if not hmac.compare_digest(token.encode(), _mac(cookie, "form").encode()):
        raise Forbidden("the form is from before you signed in; load its page again")


def chosen(do: str, known: Mapping[str, Choice]) -> Choice:
    """Return the value of the pressed button; raises BadInput."""
    if do not in known:
        raise BadInput.at("/do", f"must be one of {', '.join(known)}; got {do!r:.40}", "unknown")
    return known[do]


def check_version(row: Mapping[str, Any], version: str) -> None:
    """Raise StaleVersion unless the form was made for the row as it is now."""
    if version != str(row["version"]):
        told = f"somebody has changed {row['name']} meanwhile; load its page again"
        raise StaleVersion(f"{told}, and change it then")


def filled(body: type[Body], **values: Any) -> Body:
    """Build an operation's body from form fields; raises RequestValidationError, like a call."""
    try:
        return body.model_validate(values)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error


def whole_number(text: str) -> int | str:
    """Return the number that was typed; a text that is none is refused by the operation."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text


def number(text: str) -> float | int | str:
    """Return the number that was typed, which may have a fraction; else the text."""
    fraction = re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,6})?", text)
    return float(text) if fraction and not text.isdecimal() else whole_number(text)


def numbers_by_kind(field: str, text: str) -> dict[str, int]:
    """Read how many devices of which kinds, such as "cuda=8, cpu=2"; raises BadInput."""
    return pairs(field, text, "cuda=4, cpu=2", whole_number)


def pairs(field: str, text: str, example: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Read pairs such as "cuda=8, cpu=2"; raises BadInput where one has no value, or where `read`
    finds no number.
    """
    found = dict[str, Any]()
    spaced = " ".join(text.replace(",", " ").split())
    for each in spaced.replace(" =", "=").replace("= ", "=").split():
        key, _, typed = each.partition("=")
        value = read(typed)
        if not (key and typed) or (read is not str and isinstance(value, str)):
            told = f"the {field} must be like {example}; got {each!r:.60}"
            raise BadInput.at(f"/{field}", told, "form")
        found[key] = value
    return found


def pairs_text(values: Mapping[str, Any]) -> str:
    """Return pairs as `pairs` reads them."""
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))


def number_text(value: float) -> str:
    """Return a number as `number` reads it, with all of its digits."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


# --- the next page's message --------------------------------------------------------------------


def sealed(cookie: str, words: str) -> str:
    return f"{_mac(cookie, f'told {words}')}.{base64.urlsafe_b64encode(words.encode()).decode()}"


def opened(cookie: str, sealed: str) -> Told | None:
    """Return the message; None if this session did not sign it."""
    mac, _, text = sealed.partition(".")
    try:
        words = base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    good = hmac.compare_digest(mac.encode(), _mac(cookie, f"told {words}").encode())
    return Told(words=words) if good else None


def _mac(cookie: str, what: str) -> str:
    return hmac.new(cookie.encode(), what.encode(), hashlib.sha256).hexdigest()

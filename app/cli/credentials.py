"""Finds the service's address and the key: in the environment, then in files.

The order is: ROUNDHOUSE_URL and ROUNDHOUSE_KEY; what `roundhouse login` stored; what `make up` left
in its data folder. A stored key is sent only to the address with which it was stored. So if
ROUNDHOUSE_URL is set and ROUNDHOUSE_KEY is not, a stored key is used only if its address is the
same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.home import HOST, PORT, home


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Holds an address and a key; `source` tells a person where they were found."""

    url: str
    key: str
    source: str


class BadAddress(Exception):
    """The given address of the service is invalid."""


class NoLogin(Exception):
    """No service, or no key for it, was found."""


def found(who: str | None = None) -> Login:
    """Return the login to use; `who` is TENANT or TENANT:ROLE among the keys of `make up`.

    Raises NoLogin; and BadAddress for a wrong ROUNDHOUSE_URL.
    """
    url = os.environ.get("ROUNDHOUSE_URL", "")
    url = address(url, "ROUNDHOUSE_URL") if url else ""
    key = os.environ.get("ROUNDHOUSE_KEY", "")
    stored = list(_stored(who))
    if key and who is None:
        url = url or (stored[0].url if stored else _default_url())
        return Login(url=url, key=key, source="ROUNDHOUSE_KEY")
    for login in stored:
        if url in ("", login.url):
            return login
    raise NoLogin(
        f"no API key {(f'for {url}' if url else 'here')}: run `roundhouse login --url URL`, or set "
        "ROUNDHOUSE_URL and ROUNDHOUSE_KEY, or start a service with `make up`"
    )


def address(url: str, given_by: str) -> str:
    """Return the address without a trailing slash; raises BadAddress if it is no HTTP address."""
    if not re.fullmatch(r"https?://[^\s/?#][^\s?#]*", url):
        raise BadAddress(
            f"{given_by} must be an address such as http://localhost:8000; got {url!r}"
        )
    return url.rstrip("/")


def store(login: Login) -> Path:
    """Store URL and key in a file that only its owner can read."""
    file = login_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump({"url": login.url, "key": login.key}, out)
    new.replace(file)
    return file


def login_file() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "roundhouse" / "login.json"


def _stored(who: str | None) -> Iterator[Login]:
    if who is None and (facts := _read(login_file())):
        yield Login(url=facts["url"], key=facts["key"], source=str(login_file()))
    yield from _made_by_up(who)


def _made_by_up(who: str | None) -> Iterator[Login]:
    """Yield the login of this tenant and role. If no tenant and role are named, yield the login of
    a member, of the first tenant that has one.
    """
    file = home() / "keys.json"
    keys: dict[str, dict[str, str]] = _read(file) or {}
    if who is None:
        who = next((tenant for tenant in keys if "member" in keys[tenant]), "")
        if not who:
            return
    tenant, _, role = who.partition(":")
    roles = keys.get(tenant, {})
    role = role or ("member" if "member" in roles else next(iter(roles), ""))
    if role not in roles:
        known = ", ".join(f"{tenant}:{role}" for tenant in keys for role in keys[tenant])
        raise NoLogin(f"{file} has no key for {who}; it has {known or 'none'}")
    url = (_read(home() / "run" / "up.json") or {}).get("url") or _default_url()
    yield Login(url=url, key=roles[role], source=f"{file} ({tenant}:{role})")


def _default_url() -> str:
    host, port = os.environ.get("ROUNDHOUSE_HOST", HOST), os.environ.get("ROUNDHOUSE_PORT", PORT)
    return f"http://{host}:{port}"


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except PermissionError:
        return None  # another user's service
    except ValueError as error:
        raise NoLogin(f"{file} is damaged ({error}): delete it, or log in again") from error

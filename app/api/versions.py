"""Handles `ETag` and `If-Match`: a change names the version on which it is based."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from app.errors import StaleVersion, VersionNeeded

IfMatch = Annotated[
    str | None,
    Header(max_length=100, description="The `ETag` that you read.", examples=['"1"']),
]


def etag(version: int) -> str:
    return f'"{version}"'


def check_version(if_match: str | None, version: int) -> None:
    """Raise VersionNeeded or StaleVersion, unless `if_match` names this version."""
    if if_match is None:
        raise VersionNeeded(
            f"read the resource first, and send its current ETag {etag(version)} as If-Match"
        )
    given = {part.strip() for part in if_match.split(",")}
    if etag(version) not in given and "*" not in given:
        raise StaleVersion(
            f"If-Match names version {if_match}, but the current version is {etag(version)}"
        )

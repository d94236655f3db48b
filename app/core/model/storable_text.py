"""Decides whether Postgres can store a text."""

from __future__ import annotations


def is_storable(text: str) -> bool:
    """True if Postgres can store the text: it has no NUL, and no half of a surrogate pair."""
    if "\x00" in text:
        return False
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)

"""Runs the command `roundhouse` in this process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from typer import testing
from typer.main import get_command

from app.cli import main

# A run would otherwise build the tree of all verbs anew, which takes a tenth of a second.
testing._get_command = cache(get_command)


def invoke(words: Iterable[object], **how: Any) -> testing.Result:
    """Run `roundhouse` with these words; `how` is that of `CliRunner.invoke`."""
    return testing.CliRunner().invoke(main.app, [str(word) for word in words], **how)

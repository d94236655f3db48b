"""Says how the files of a running command are listed and read, and within which bounds.

A call of the API opens a tunnel of the kind FILES (`provisions.tunnel`) into the sandbox of the
command.  The helper there (`workers.commands.shells.files_end`) sends what the words of its ticket
name: a list of files, one file, or a folder as a zip.  It runs as the command's user, so it reads
no more than the command itself.  What it sends is checked here, because the command could have
changed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.core.model.lifecycle import ENDED
from app.core.model.phase import Phase
from app.core.model.provisions.artifacts import PATH

LIST, READ = "list", "read"
LISTED_MOST = 2000  # files of one list
LIST_BYTES = 2**20  # of one list, as JSON
HEAD_BYTES = 4096  # most bytes of the line before a content
FILE_BYTES = 2**53  # a larger size is no size of a file
PATH_RULE = "a relative path in the working folder, without '.' and '..', such as out/model.pt"


class BadAnswer(Exception):
    """Raised for bytes of the helper that are not what it should send; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFile:
    """Describes a file of a running command; `path` lies in its working folder."""

    path: str
    size_bytes: int
    modified_s: int  # since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFiles:
    """Lists files in order of their paths in each folder; `is_cut`: there are more of them."""

    files: tuple[RunningFile, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentHead:
    """Describes the content that follows: one file with this size, or the zip of a folder."""

    is_folder: bool
    size_bytes: int


def path_fault(path: str) -> str:
    """Return why a path cannot be asked for; "" if it can. An empty path is the whole folder."""
    return "" if not path or PATH.fullmatch(path) else f"must be {PATH_RULE}; got {path!r:.80}"


def why_no_files(state: str, phase: str, run_kind: str, *, has_image: bool = False) -> str:
    """Return why the files of a task cannot be read now, and what to do; "" if they can."""
    if run_kind != "command":
        return f"the task runs a {run_kind}; only a command has a working folder"
    if state in ENDED:
        return (
            f"the task is {state}, and its working folder is gone; what was kept of it is in its "
            "outputs"
        )
    if has_image:
        return (
            "the task runs in a container image, in which its folder cannot be read; its artifacts "
            "are kept when it ends"
        )
    if phase == Phase.paused:
        return "the task is paused, so nothing reads its folder; resume it, and ask again"
    if phase in (Phase.queued, Phase.preempted):
        return (
            f"the task is {phase}, so nothing reads its folder; ask again when it runs, and ask "
            "why it waits"
        )
    if state != "running":
        return f"the task is {state}; ask again in some seconds"
    return ""


def read_list(body: bytes) -> ListedFiles:
    """Read the helper's list; raises BadAnswer."""
    said = _json(body)
    try:
        files = tuple(_file(path, size, at_s) for path, size, at_s in said["files"])
        is_cut = said["is_cut"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"the list of its files is malformed: {error!r:.100}") from error
    if type(is_cut) is not bool or len(files) > LISTED_MOST:
        raise BadAnswer("the list of its files is malformed or too long")
    return ListedFiles(files=files, is_cut=is_cut)


def _file(path: Any, size: Any, at_s: Any) -> RunningFile:
    if not isinstance(path, str) or "\0" in path:
        raise BadAnswer("a path of its list is none")
    path.encode()  # raises ValueError for half a surrogate pair
    if not all(type(number) is int and 0 <= number <= FILE_BYTES for number in (size, at_s)):
        raise BadAnswer("a number of its list is none")
    return RunningFile(path=path, size_bytes=size, modified_s=min(at_s, 2**33))


def read_head(line: bytes) -> ContentHead:
    """Read the line before a content; raises BadAnswer."""
    said = _json(line)
    is_folder, size = said.get("is_folder"), said.get("size_bytes")
    if type(is_folder) is not bool or type(size) is not int or not 0 <= size <= FILE_BYTES:
        raise BadAnswer("the description of the file is malformed")
    return ContentHead(is_folder=is_folder, size_bytes=size)


def _json(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"not JSON: {error!r:.100}") from error
    if not isinstance(said, dict):
        raise BadAnswer("expected an object")
    return said


def is_words(words: Iterable[str]) -> bool:
    """True if a ticket of the kind FILES may have these words."""
    given = tuple(words)
    return len(given) == 2 and given[0] in (LIST, READ) and not path_fault(given[1])

"""Checks the messages of a tenant's process.

Texts are shortened and cleaned before they are passed on. An invalid message ends the process.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from app.core.model.failure_causes import CAUSES
from app.core.model.graphs.task_graph import MAX_BYTES, MAX_EST_MS, MAX_NODES, SIZED_LIMIT
from app.core.model.metric_rows import MESSAGE_ROWS
from app.core.model.protocol import messages
from app.core.model.protocol.wellformed import FILES_MOST, SENTENCE_MOST
from app.core.security.redaction import Redactor
from workers.process.wire import parsed_parts

JSON = dict[str, Any]


class Nonsense(Exception):
    """A resident sent a message that no genuine resident sends."""


LAST_WORDS = ("failed", "finished", "stopped")
HOSTS_LIMIT = 64  # most hosts of one gang
METRICS_LIMIT = 2_000  # most entries, summed over all executors of a graph
METRIC_CHARACTERS = 200
COPIES_LIMIT = 100_000  # most copies of blocks between executors
#: Causes that only the platform can know: a process that gives one sends nonsense.
_PLATFORM_CAUSES = frozenset({"store", "mount", "environment", "device"})
_COPY = ("block", "source", "target", "bytes")
TEXT_LIMIT = 64 * 1024
NAMES_LIMIT = 20_000


def verdict(message: JSON, redactor: Redactor) -> JSON:
    """Return the event for a resident's final message: `is` has its type, the rest are its fields.

    Values of secrets are removed from texts for people.
    """
    said = _verdict(message)
    told = {name: redactor.json(said[name]) for name in _TOLD & said.keys()}
    return {**said, **told}


_TOLD = {"message", "detail", "result"}


def _verdict(message: JSON) -> JSON:
    if message["is"] == "failed":
        return {"is": messages.Failed, **failed(message)}
    if message["is"] == "stopped":
        return {"is": messages.Stopped}
    return {
        "is": messages.Finished,
        "result": table(message, "result"),
        "passed": passed(message),
        "took_ms": took_ms(message),
        "made_bytes": made_bytes(message),
    }


def whole(body: bytes, redactor: Redactor) -> tuple[JSON, JSON | None]:
    """Parse a message that came in parts, which may take long.

    If it is a final message, also return its event.
    """
    message = parsed_parts(body)
    return message, verdict(message, redactor) if message["is"] in LAST_WORDS else None


def number(message: JSON, name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise Nonsense(f"{name} is {value!r}")
    return value


def numbers(message: JSON, name: str) -> list[int]:
    """Return a short list of numbers."""
    value = message.get(name)
    if not isinstance(value, list) or len(value) > HOSTS_LIMIT:
        raise Nonsense(f"{name} is {value!r:.100}")
    return [number({name: each}, name) for each in value]


def text(message: JSON, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise Nonsense(f"{name} is {value!r:.100}")
    return str(clean(value))


def table(message: JSON, name: str) -> JSON:
    value = message.get(name)
    if not isinstance(value, dict) or len(value) > NAMES_LIMIT:
        raise Nonsense(f"{name} is not a small table")
    cleaned: JSON = clean(value)
    return cleaned


def points(message: JSON) -> list[list[Any]]:
    """Return rows of metrics: [step, metrics]."""
    value = message.get("points", [])
    if not isinstance(value, list) or len(value) > MESSAGE_ROWS:
        raise Nonsense(f"points must be a list of at most {MESSAGE_ROWS} rows")
    if any(not isinstance(each, list) or len(each) != 2 for each in value):
        raise Nonsense("a point is not [step, metrics]")
    return [[number({"step": step}, "step"), metrics({"metrics": it})] for step, it in value]


def metrics(message: JSON) -> JSON:
    """Return metrics: numbers and short texts by name."""
    value = message.get("metrics")
    if not isinstance(value, dict) or len(value) > METRICS_LIMIT:
        raise Nonsense("metrics is not a small table")
    if any(isinstance(each, dict | list) for each in value.values()):
        raise Nonsense("a metric is a list or a table")
    short = {
        name[:METRIC_CHARACTERS]: each[:METRIC_CHARACTERS] if isinstance(each, str) else each
        for name, each in value.items()
    }
    cleaned: JSON = clean(short)
    return cleaned


def ranked(message: JSON, most_step: int | None) -> JSON:
    """Return the value that ranks an image: a finite number or None; {} for no report.

    It is of `most_step` or before; None: its step is the command's own.
    """
    value = table({"ranked": {}, **message}, "ranked")
    if not value:
        return {}
    step = number({"step": value.get("step")}, "step")
    if most_step is not None and step > most_step:
        raise Nonsense(f"a value of a later step than {most_step}")
    figure = value.get("value")
    if figure is not None and not (isinstance(figure, float) and isfinite(figure)):
        raise Nonsense(f"the value is {figure!r:.100}")
    return {"step": step, "value": figure}


def words(message: JSON, name: str) -> list[str]:
    """Return a few short words; the rest is cut off."""
    value = message.get(name)
    if not isinstance(value, list):
        raise Nonsense(f"{name} is {value!r:.100}")
    return [str(clean(str(word)[:40])) for word in value[:16]]


def clean(value: Any, depth: int = 0) -> Any:
    """Return the value as JSON that Postgres takes: without NUL, lone surrogates or NaN, and of
    limited size.

    A whole number outside int64 becomes a text: readers in other languages could not hold it.
    """
    if depth > 16:
        raise Nonsense("nested deeper than 16")
    if isinstance(value, str):
        text = value[:TEXT_LIMIT].encode("utf-8", "replace").decode()
        return text.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {clean(key, depth + 1): clean(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [clean(part, depth + 1) for part in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{value:e}" if abs(value) < 10**300 else "more than 1e300"
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    return value


def passed(message: JSON) -> list[JSON]:
    """Return the copies between the executors of a graph, as in
    core.model.protocol.messages.Finished."""
    said = message.get("passed", [])
    if not isinstance(said, list) or len(said) > COPIES_LIMIT:
        raise Nonsense(f"passed must be a list of at most {COPIES_LIMIT} items")
    found = []
    for one in said:
        if not isinstance(one, list) or len(one) != len(_COPY):
            raise Nonsense(f"what passed is {one!r:.100}")
        copy = dict(zip(_COPY, one, strict=True))
        numbers = {name: number(copy, name) for name in _COPY[1:]}
        found.append({"block": text(copy, "block")[:200], **numbers})
    return found


def took_ms(message: JSON) -> dict[str, float]:
    """Return the durations of a graph's nodes, as in core.model.protocol.messages.Finished."""
    return _measured(message, "took_ms", float, rows=MAX_NODES, most=MAX_EST_MS)


def made_bytes(message: JSON) -> dict[str, int]:
    """Return the sizes of a graph's blocks, as in core.model.protocol.messages.Finished."""
    return _measured(message, "made_bytes", int, rows=SIZED_LIMIT, most=MAX_BYTES)


def _measured(message: JSON, what: str, kind: type[int | float], *, rows: int, most: float) -> JSON:
    """Return a message's table of numbers, after a check that each lies between 0 and `most`."""
    said = message.get(what, {})
    if not isinstance(said, dict) or len(said) > rows:
        raise Nonsense(f"{what} must be a short table")
    for value in said.values():
        if type(value) is not kind or not 0 <= value <= most:
            raise Nonsense(f"{what} of {value!r:.100}")
    return {clean(name[:200]): value for name, value in said.items()}


def dropped(message: JSON) -> JSON:
    """Return the files of a command that are not kept, as in
    core.model.protocol.messages.Finished."""
    said = table({"dropped": {}, **message}, "dropped")
    if not said:
        return {}
    first = said.get("first")
    if not isinstance(first, list) or len(first) > FILES_MOST:
        raise Nonsense(f"the first dropped files are {first!r:.100}")
    names = [text({"name": each}, "name")[:SENTENCE_MOST] for each in first]
    return {"files": number(said, "files"), "bytes": number(said, "bytes"), "first": names}


def failed(message: JSON) -> JSON:
    """Return the fields of core.model.protocol.messages.Failed from a resident's final message."""
    cause = text(message, "cause")
    if cause not in CAUSES or cause in _PLATFORM_CAUSES:
        raise Nonsense(f"cause is {cause!r}")
    return {
        "cause": cause,
        "message": text(message, "message")[:4000],
        "detail": text(message, "detail"),
        "exit_status": exit_status(message),
    }


def exit_status(message: JSON) -> int | None:
    """Return the exit status that a final message has of the task's own process, if it has one."""
    status = message.get("exit_status")
    if status is not None and number(message, "exit_status") > 255:
        raise Nonsense(f"exit_status is {status!r}")
    return status

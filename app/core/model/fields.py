"""Reads the fields of JSON objects that a tenant submits, and collects every fault with its place.

`Fields` reads one object; the modules of single fields and `core.model.descriptor` use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import islice
from typing import Any

from app.core import units
from app.core.model.storable_text import is_storable

JSON = dict[str, Any]

MAX_FAULTS = 100  # most faults that are listed; further ones are counted
UNKNOWN_TOLD = 10  # unknown fields listed per object; further ones are counted
MAX_HINTED = 64  # characters; for a longer name no similar name is suggested
MAX_COMPARED = 200  # known names with which an unknown name is compared
MAX_DEPTH = 32  # most levels of lists and objects inside each other

# examples for faults: fields whose form a newcomer may not guess
_EXAMPLES = {
    "tasks": '[{"name": "train", "run": {"job": "train:Train"}}]',
    "run": '{"job": "train:Train"}',
    "command": '["python", "train.py"]',
    "params": '{"steps": 100}',
    "devices": '{"max": 2}',
    "retry": '{"max": 3}, or "never"',
    "resources": '{"cpus": 4, "memory_bytes": 16e9}',
    "isolation": '"process" or "user"',
    "collectives": '"exact" or "native"',
    "notice": '{"signal": "SIGUSR1", "seconds": 60}',
    "checkpoint": '{"every_s": 60}',
    "best": '{"metric": "loss"}',
    "network": '{"allow": ["huggingface.co:443"]}',
    "env": '{"HF_HOME": "data/hf"}',
    "secrets": '["HF_TOKEN"]',
    "environment": '{"requirements": "requirements.txt"}',
    "start": '{"not_before": "2026-01-31T18:00:00+01:00"}',
    "mounts": '{"/data": "imagenet"}',
    "image": '"ubuntu"',
    "array": '{"count": 100, "at_once": 10}',
    "matrix": '{"lr": [0.001, 0.0001], "seed": "0-9"}',
    "stop": '{"metric": "loss", "rungs": [1000, 3000, 9000]}',
    "search": '{"trials": 50, "space": {"lr": {"log": [1e-5, 1e-2]}, "layers": [2, 4]}}',
}
NEGATIONS = ("not_", "no_", "without_", "exclude_")  # prefixes of wrong names
OF_REQUEST = frozenset({"tier", "priority", "bundle", "labels", "notify", "tasks", "environment"})
OF_TASK = frozenset(
    {"run", "world_size", "params", "inputs", "outputs", "artifacts", "publish", "start"}
    | {"devices", "islands", "reservation"}
    | {"checkpoint", "retry", "max_duration_s", "from_checkpoint", "network"}
    | {"env", "secrets", "mounts", "image", "notice", "resources", "session", "isolation"}
    | {"collectives"}
    | {"array", "matrix", "search", "stop"}
)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
NAME_RULE = "1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit"
WORD_RULE = "1 to 63 letters, digits and '_', not starting with a digit"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the input: its place (a JSON Pointer), a sentence, and a stable code."""

    pointer: str
    detail: str
    code: str = "invalid"


class Fields:
    """Reads the fields of one object and collects faults. Fields that are never read count as
    unknown.

    A field that is missing, null or wrong reads as its default, so that reading can continue.
    """

    def __init__(self, body: object, pointer: str, faults: list[Fault], given: bool = True) -> None:
        self.pointer, self.faults = pointer, faults
        self.given = given and isinstance(body, dict)
        self.body: JSON = body if isinstance(body, dict) else {}
        self._known: list[str] = []
        if given and not self.given:
            told = f"must be an object, not {_kind(body)}"
            self.fault("", told + _example(pointer.rpartition("/")[2]), "type")

    def fault(self, key: str, detail: str, code: str = "invalid") -> None:
        where = f"{self.pointer}/{key}" if key else self.pointer
        self.faults.append(Fault(where, detail, code))

    def require(self, *keys: str) -> None:
        for key in keys:
            if self.given and self.body.get(key) is None:
                self.fault(key, f"{key} is required", "missing")

    def close(self) -> None:
        """Report each field that was not read as unknown, with a hint; at most UNKNOWN_TOLD of
        them.
        """
        known = set(self._known)
        unknown = [key for key in self.body if key not in known]
        for key in unknown[:UNKNOWN_TOLD]:
            # Faults beyond MAX_FAULTS are not listed, so do not search a similar name for them.
            near = near_name(key, self._known) if len(self.faults) < MAX_FAULTS else None
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(self._known)}"
            hint = _place_of(key) or hint
            where = key if len(key) <= MAX_HINTED else ""
            self.fault(escaped(where), f"unknown field {_shown(key)}; {hint}", "unknown-field")
        if (more := len(unknown) - UNKNOWN_TOLD) > 0:
            self.fault("", f"{more} more unknown fields", "unknown-field")

    def text(self, key: str, default: Any, pattern: re.Pattern[str], rule: str) -> Any:
        """Return a text, or `default` (which may be None)."""
        value = self._read(key, str, "a text")
        if value is None:
            return default
        if not pattern.fullmatch(value):
            self.fault(key, f"must be {rule}; got {_shown(value)}")
            return default
        return value

    def texts(self, key: str, pattern: re.Pattern[str] | None, rule: str) -> tuple[str, ...]:
        """Return a list of texts.

        If there is a `pattern`, each text must match it, and may occur only once.
        """
        good: list[str] = []
        seen: set[str] = set()
        for n, value in enumerate(self._read(key, list, "a list") or []):
            if not isinstance(value, str):
                self.fault(f"{key}/{n}", f"must be a text, not {_kind(value)}", "type")
            elif pattern is not None and not pattern.fullmatch(value):
                self.fault(f"{key}/{n}", f"must be {rule}; got {_shown(value)}")
            elif pattern is not None and value in seen:
                self.fault(f"{key}/{n}", f"must not list {value!r} twice", "twice")
            else:
                good.append(value)
                seen.add(value)
        return tuple(good)

    def integers(self, key: str, *, least: int, most: int, at_most: int) -> tuple[int, ...]:
        """Return a list of up to `at_most` different whole numbers."""
        found = self._read(key, list, "a list") or []
        if len(found) > at_most:
            self.fault(key, f"must have at most {at_most} items; got {len(found)}", "range")
        items = {str(n): value for n, value in enumerate(found[:at_most])}
        inner = Fields(items, f"{self.pointer}/{key}", self.faults)
        inner.require(*items)
        return tuple({inner.integer(n, least, least=least, most=most): None for n in items})

    def integer(self, key: str, default: int, *, least: int, most: int, why: str = "") -> int:
        """Return a whole number; a form like 8e9 is accepted.  `why` explains the bounds."""
        value = self._read(key, (int, float), "a whole number")
        if value is None:
            return default
        if isinstance(value, float) and not value.is_integer():
            self.fault(key, f"must be a whole number; got {value}", "type")
        elif not least <= value <= most:
            self.fault(key, f"must be from {least} to {most}{why}; got {value}", "range")
        else:
            return int(value)
        return default

    def number(self, key: str, default: float, *, above: float, most: float) -> float:
        value = self._read(key, (int, float), "a number")
        if value is None:
            return default
        if not above < value <= most:
            self.fault(key, f"must be above {above:g} and at most {most:g}; got {value}", "range")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._read(key, bool, "true or false")
        return default if value is None else bool(value)

    def one_of(self, key: str, words: tuple[str, ...], default: str) -> str:
        value = self._read(key, str, "a text")
        if value is None or value in words:
            return value or default
        self.fault(key, f"must be one of {', '.join(words)}; got {_shown(value)}")
        return default

    def time(self, key: str) -> float | None:
        """Return an RFC 3339 time in seconds since 1970; the time must have an offset."""
        value = self._read(key, str, "a text")
        if value is None:
            return None
        try:
            at = datetime.fromisoformat(value)
            if at.tzinfo is not None and "T" in value.upper():
                # raises OverflowError if the year in UTC is out of range
                return at.astimezone(UTC).timestamp()
        except (ValueError, OverflowError):
            pass  # reported below, like a time without an offset
        self.fault(key, f"must be a time like 2026-01-31T18:00:00+01:00; got {_shown(value)}")
        return None

    def mapping(self, key: str) -> JSON:
        value: JSON = self._read(key, dict, "an object") or {}
        return value

    def items(
        self, key: str, *, least: int, most: int, is_required: bool = True
    ) -> list[tuple[str, object]]:
        """Return the items of a list, each with its pointer."""
        value = self._read(key, list, "a list")
        if value is None and is_required and self.given and self.body.get(key) is None:
            self.fault(key, f"{key} is required", "missing")
        elif value is not None and not least <= len(value) <= most:
            self.fault(key, f"must have from {least} to {most} items; got {len(value)}", "range")
        return [(f"{self.pointer}/{key}/{n}", item) for n, item in enumerate((value or [])[:most])]

    def inside(self, key: str) -> Fields:
        """Return the object under `key`; if it is missing, all of its fields read as defaults."""
        self._known.append(key)
        given = self.body.get(key) is not None
        return Fields(self.body.get(key), f"{self.pointer}/{key}", self.faults, given)

    def _read(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        """Return the value under `key`, or None if it is missing, null or of another kind."""
        self._known.append(key)
        value = self.body.get(key)
        if value is None:
            return None
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        if isinstance(value, str) and isinstance(kind, tuple) and (parse := parser_of(key)):
            try:
                return parse(value)
            except ValueError as error:
                self.fault(key, f"must be {wanted}, or {error}; got {_shown(value)}", "type")
                return None
        self.fault(key, f"must be {wanted}, not {_kind(value)}{_example(key)}", "type")
        return None


def parser_of(key: str) -> Callable[[str], float] | None:
    """Return the function that reads texts of this field with a unit, such as "16GB"; None if it
    has no unit.
    """
    if key.endswith("_bytes"):
        return units.parse_bytes
    return units.parse_seconds if key.endswith("_s") or key == "seconds" else None


def _example(key: str) -> str:
    found = _EXAMPLES.get(key)
    return f"; for example {found}" if found else ""


def _place_of(key: str) -> str:
    """Return a hint if a known field was written at the wrong place; "" if not."""
    if key in OF_REQUEST:
        return "it belongs to the request, beside tasks"
    return "it belongs to a task, beside name and run" if key in OF_TASK else ""


def not_plain(body: object) -> Iterator[Fault]:
    """Yield faults for values that JSON in Postgres cannot hold, and for values nested too
    deeply.
    """
    stack: list[tuple[str, object, int]] = [("", body, 0)]
    while stack:
        where, value, depth = stack.pop()
        if depth > MAX_DEPTH:
            yield Fault(where, f"must be nested at most {MAX_DEPTH} levels deep", "range")
        elif isinstance(value, dict):
            stack += [(f"{where}/{escaped(key)}", item, depth + 1) for key, item in value.items()]
            stack += [(f"{where}/{escaped(key)}", key, depth + 1) for key in value]
        elif isinstance(value, list):
            stack += [(f"{where}/{n}", item, depth + 1) for n, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            yield Fault(where, f"{value} is not a valid JSON number")
        elif isinstance(value, str) and not is_storable(value):
            yield Fault(where, "a text contains a NUL character or half a surrogate pair")


def shortened(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    if len(faults) <= MAX_FAULTS:
        return tuple(faults)
    more = Fault("", f"{len(faults) - MAX_FAULTS} more faults are not listed", "more")
    return (*faults[:MAX_FAULTS], more)


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "an object"),
)


def _kind(value: object) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def near_name(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None if there is none.

    It is never the opposite: not `labels` for `not_labels`. Names longer than MAX_HINTED are not
    compared, because that takes long.
    """
    if len(word) > MAX_HINTED:
        return None
    opposites = {word.removeprefix(negation) for negation in NEGATIONS} - {word}
    names = [name for name in islice(known, MAX_COMPARED) if name not in opposites]
    near = get_close_matches(word, names, n=1)
    return near[0] if near else None


class Hints:
    """Suggests known names that were probably meant, for the first MAX_FAULTS unknown names.

    Each suggestion takes a millisecond, and further faults are not listed.
    """

    def __init__(self) -> None:
        self._left = MAX_FAULTS

    def hint(self, word: str, known: Iterable[str]) -> str:
        self._left -= 1
        near = near_name(word, known) if self._left >= 0 else None
        return f"; did you mean {near!r}?" if near else ""


def escaped(key: str) -> str:
    """Escape a key as one token of a JSON Pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")

"""Checks the form of a message before it is used: every name, every hash, every type.

A name in an order becomes a path or a store key on a device, and a hash in an event becomes one at
the island.  So both are checked here, in one place, when the message is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,126}")
_HASH = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_OUTPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}|artifacts\.zip")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_GRAPH = re.compile(r"sha256:[0-9a-f]{64}")
_DATABLOCK = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}@[1-9][0-9]{0,8}")
_FORMAT = re.compile(r"[a-z0-9]{1,20}")
_ADDRESS = re.compile(r"[A-Za-z0-9:._%-]{1,253}")
_PROCESS = re.compile(r"[A-Za-z0-9-]{0,64}")
_LARGEST = 2**63 - 1


class BadMessage(Exception):
    """The message is not valid."""


# --- values ---------------------------------------------------------------------------------------


def _text(pattern: re.Pattern[str], *, or_none: bool = False) -> Check:
    """Return a check for texts that match the pattern; `or_none`: an empty text is valid too."""

    def check(value: Any) -> bool:
        if not isinstance(value, str):
            return False
        return (or_none and not value) or pattern.fullmatch(value) is not None

    return check


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _is_place(value: Any) -> bool:
    """True for [address, port], or [] for none."""
    if value == []:
        return True
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and is_address(value[0]) and _is_count(value[1]) and value[1] < 2**16


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _by_name(name: Check, check: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name(key) and check(it) for key, it in value.items())
    )


def _object(needed: Mapping[str, Check], other: Mapping[str, Check] | None = None) -> Check:
    """Return a check for objects with these fields, and optionally the `other` fields.

    Further fields are not checked, because no path or key is made of them.
    """
    all_of_it = {**needed, **(other or {})}

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or needed.keys() - value.keys():
            return False
        return all(is_good(value[name]) for name, is_good in all_of_it.items() if name in value)

    return check


def _or_nothing(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_preset(value: Any) -> bool:
    plain = (str, int, float, bool, type(None))
    return _by_name(is_word, lambda each: isinstance(each, plain))(value)


def _is_run(value: Any) -> bool:
    """True for one of the four things that a task runs."""
    said = [name for name in _RUNS if isinstance(value, dict) and name in value]
    return len(said) == 1 and _RUNS[said[0]](value[said[0]])


def _is_place_of_task(value: Any) -> bool:
    """True for [task, epoch]."""
    return isinstance(value, list) and len(value) == 2 and is_id(value[0]) and _is_count(value[1])


def _is_point(value: Any) -> bool:
    """True for [step, metrics]."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_count(value[0])
        and isinstance(value[1], dict)
    )


is_id, is_word, is_address = _text(_ID), _text(_WORD), _text(_ADDRESS)
_is_hash, _is_bundle = _text(_HASH), _text(_HASH, or_none=True)
_RUNS: dict[str, Check] = {
    "job": _text(_ENTRY),
    "function": _text(_ENTRY),
    "graph": _text(_GRAPH),
    "command": _each(lambda word: isinstance(word, str)),
}
_COPY = _object({"place": _is_place, "key": _is_hash})
_KEPT: dict[str, Check] = {"sha256": _is_hash, "size_bytes": _is_count}
_SOURCE = _object(
    _KEPT, {"format": _text(_FORMAT), "datablock": _text(_DATABLOCK), "copies": _each(_COPY)}
)
_IMAGE = _object({"sha256": _is_hash, "step": _is_count, "key": _is_bundle})
_OUTPUTS = _by_name(_text(_OUTPUT), _object(_KEPT, {"format": _text(_FORMAT)}))
_EXPECTED = _object(
    {
        "task": is_id,
        "epoch": _is_count,
        "tenant": is_id,
        "bundle": _is_bundle,
        "inputs": _each(_SOURCE),
        "image": _or_nothing(_IMAGE),
    }
)
_AHEAD = _object({"task": is_id, "sha256": _is_hash, "bytes": _is_count, "us": _is_count})
_JOINED = _object({}, {"secret": _is_hash, "home": _is_place})
_FACTS = _object(
    {},
    {
        "host": is_id,
        "island": is_id,
        "kind": is_id,
        "key": _is_hash,
        "threads": _is_count,
        "memory_bytes": _is_count,
        "host_memory_bytes": _is_count,
        "torch": lambda value: isinstance(value, str) and len(value) < 100,
        "sandbox": _each(is_id),
        "limits": _each(is_id),
        "unlimited": _each(is_id),
        "capabilities": _each(is_id),
        "splice": lambda value: isinstance(value, bool),
        "held_bytes": _by_name(is_id, lambda pair: _each(_is_count)(pair) and len(pair) == 2),
    },
)

# --- fields ---------------------------------------------------------------------------------------

#: The check of a field, in every message.
FIELDS: dict[str, Check] = {
    "task": is_id,
    "epoch": _is_count,
    "seq": _is_count,
    "device": is_id,
    "incarnation": _text(_PROCESS),
    "sent_us": _is_count,
    "step": _is_count,
    "held_us": _is_count,
    "tenant": is_id,
    "run": _is_run,
    "bundle": _is_bundle,
    "preset": _is_preset,
    "inputs": _by_name(is_word, _SOURCE),
    "images": _each(_IMAGE),
    "publish": _each(is_word),
    "seats": _each(_is_count),
    "successor": _text(_ID, or_none=True),
    "sha256": _is_hash,
    "size_bytes": _is_count,
    "new_bytes": _is_count,
    "output": is_word,
    "port": is_word,
    "kept": _object(_KEPT, {"format": _text(_FORMAT)}),
    "source": _SOURCE,
    "expect": _each(_EXPECTED),
    "next": _each(is_id),
    "keep": _each(_is_place_of_task),
    "drop": _each(_is_place_of_task),
    "ahead": _each(_AHEAD),
    "hung": _each(_is_place_of_task),
    "points": _each(_is_point),
    "peers": _each(_is_hash),
    "secret": _is_bundle,
    "facts": _FACTS,
    "lines": _each(lambda line: _each(lambda part: isinstance(part, str))(line) and len(line) == 2),
}

#: The check of a field in messages where the name has another meaning.
ELSEWHERE: dict[tuple[str, str], Check] = {
    ("Launch", "outputs"): _each(is_word),
    ("Finished", "outputs"): _OUTPUTS,
    ("Failed", "outputs"): _OUTPUTS,
    ("Launch", "links"): _JOINED,
    ("Resize", "links"): _JOINED,
    ("Alive", "links"): _is_place,
}

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "JSON": (dict,),
    "dict": (dict,),
    "list": (list,),
}


def check(kind: str, types: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Raises BadMessage if a field does not have its type in `types`, or is not well formed."""
    for name, value in values.items():
        declared = types[name].removesuffix(" | None")
        if value is None and declared != types[name]:
            continue
        is_good = ELSEWHERE.get((kind, name)) or FIELDS.get(name)
        wanted = _TYPES[declared.partition("[")[0]]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise BadMessage(f"{kind}.{name} is {value!r:.100}")
        if is_good is not None and not is_good(value):
            raise BadMessage(f"{kind}.{name} is not well formed: {value!r:.100}")

"""Checks the form of a message before it is used: every name, every hash, every type.

A name in an order becomes a path or a store key on a device, and a hash in an event becomes one at
the island.  So both are checked here, in one place, when the message is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite
from typing import Any

from app.core.model.device_choice import BUILD_STATES, NEED
from app.core.model.failure_causes import MOST_PATTERN
from app.core.model.storable_text import is_storable

Check = Callable[[Any], bool]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,126}")
_HASH = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_OUTPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}|artifacts\.zip")
_DATABLOCK = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}@[1-9][0-9]{0,8}")
_FORMAT = re.compile(r"[a-z0-9]{1,20}")
_ADDRESS = re.compile(r"[A-Za-z0-9:._%-]{1,253}")
_PROCESS = re.compile(r"[A-Za-z0-9-]{0,64}")
_LARGEST = 2**63 - 1
PROGRESS_MOST = 2**53  # bound of a number in a Pulse; the island computes with products of it
FINDINGS_MOST = 32  # most findings in a report of a device's health
MAX_PATH = 255  # most characters of the path or the target of a mount
BUILD_TOLD_MOST = 5000  # most characters of the reason why packages were not installed
FILES_MOST = 5  # most files that are named among those that are not kept
SENTENCE_MOST = 500  # most characters of the reason of a finding


class BadMessage(Exception):
    """Raised for a message that is not valid."""


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


def _is_figure(value: Any) -> bool:
    """True if the value is a finite number that every reader can store."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -_LARGEST <= value <= _LARGEST


def _is_finite(value: Any) -> bool:
    """True if the value is a number that a column of double precision can hold."""
    return isinstance(value, float) and isfinite(value)


def _is_sentence(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= SENTENCE_MOST and value.isprintable()


def as_sentence(said: str) -> str:
    """Return the text in a form that a message can have: one printable line, and not too long."""
    shown = "".join(letter if letter.isprintable() else " " for letter in said)
    return shown if len(shown) <= SENTENCE_MOST else f"{shown[: SENTENCE_MOST - 1]}…"


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= SENTENCE_MOST and is_storable(value)


def _is_place(value: Any) -> bool:
    """True if the value is [address, port], or [] for no address."""
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
    """Return a check for objects that have the fields `needed` and may have the `other` fields.

    Further fields are not checked, because they never become paths or keys.
    """
    all_of_it = {**needed, **(other or {})}

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or needed.keys() - value.keys():
            return False
        return all(is_good(value[name]) for name, is_good in all_of_it.items() if name in value)

    return check


def _or_nothing(check: Check) -> Check:
    return lambda value: value is None or check(value)


def is_path(path: Any) -> bool:
    """True if the value is an absolute path of at most MAX_PATH characters, without `.`, `..` and
    empty parts.
    """
    if not isinstance(path, str) or not path.startswith("/") or len(path) > MAX_PATH:
        return False
    parts = path[1:].split("/")
    return path.isprintable() and not any(part in ("", ".", "..") for part in parts)


def _is_preset(value: Any) -> bool:
    plain = (str, int, float, bool, type(None))
    return _by_name(is_word, lambda each: isinstance(each, plain))(value)


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 100


def _is_announced_key(value: Any) -> bool:
    """True for a public key after its signature, as a host announces it."""
    signature, colon, key = value.partition(":") if isinstance(value, str) else ("", "", "")
    return len(signature) == 2 * len(key) and colon == ":" and _is_hash(key)


def _is_place_of_task(value: Any) -> bool:
    """True if the value is a list [task, epoch]."""
    return isinstance(value, list) and len(value) == 2 and is_id(value[0]) and _is_count(value[1])


def _is_point(value: Any) -> bool:
    """True if the value is a list [step, metrics]."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_count(value[0])
        and isinstance(value[1], dict)
    )


def _is_progress(value: Any) -> bool:
    """True if the value is a list of three counts below PROGRESS_MOST."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(type(count) is int and 0 <= count < PROGRESS_MOST for count in value)


def _is_process(value: Any) -> bool:
    """True if the value is a list [device, incarnation]."""
    return isinstance(value, list) and len(value) == 2 and is_id(value[0]) and _is_name(value[1])


def _is_pulse(value: Any) -> bool:
    """True if the value is a list [sent_us, report, answer, progress]."""
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(map(_is_count, value[:3])) and _are_progresses(value[3])


is_id, is_word, is_address = _text(_ID), _text(_WORD), _text(_ADDRESS)
_is_need, _is_name = _text(NEED), _text(_PROCESS)
_are_progresses = _each(_is_progress)
_is_hash, _is_bundle = _text(_HASH), _text(_HASH, or_none=True)
_COPY = _object({"place": _is_place, "key": _is_hash})
_KEPT: dict[str, Check] = {"sha256": _is_hash, "size_bytes": _is_count}
_SOURCE = _object(
    _KEPT, {"format": _text(_FORMAT), "datablock": _text(_DATABLOCK), "copies": _each(_COPY)}
)
_IMAGE = _object({"sha256": _is_hash, "step": _is_count, "key": _is_bundle})
_OUTPUTS = _by_name(_text(_OUTPUT), _object(_KEPT, {"format": _text(_FORMAT)}))
_IMAGE_KEY = _object({}, {"sealed": lambda it: isinstance(it, str), "refused": _is_sentence})
_EXPECTED = _object(
    {
        "task": is_id,
        "epoch": _is_count,
        "tenant": is_id,
        "bundle": _is_bundle,
        "inputs": _each(_SOURCE),
        "image": _or_nothing(_IMAGE),
    },
    {"environment": _is_bundle, "image_key": _IMAGE_KEY},
)
_AHEAD = _object({"task": is_id, "sha256": _is_hash, "bytes": _is_count, "us": _is_count})


def _is_build(value: Any) -> bool:
    """True if the value is a list [state, text] with one of BUILD_STATES."""
    if not (isinstance(value, list) and len(value) == 2 and value[0] in BUILD_STATES):
        return False
    told = value[1]
    return isinstance(told, str) and len(told) <= BUILD_TOLD_MOST and is_storable(told)


_JOINED = _object({}, {"secret": _is_hash, "home": _is_place})
_FACTS = _object(
    {},
    {
        "host": is_id,
        "island": is_id,
        "kind": is_id,
        "key": _is_hash,
        "exchange_key": _is_announced_key,
        "threads": _is_count,
        "memory_bytes": _is_count,
        "host_memory_bytes": _is_count,
        "labels": _each(is_id),
        "offers": _each(_is_need),
        "gives": _by_name(is_word, _is_count),
        "watched": _each(is_word),
        "mounts": _is_bundle,
        "images": _is_bundle,
        "unpacked": _by_name(
            is_id, _object({"digest": _is_hash, "size_bytes": _is_count, "took_us": _is_count})
        ),
        "environments": _by_name(_is_hash, lambda pair: _each(_is_count)(pair) and len(pair) == 2),
        "builds": _by_name(_is_hash, _is_build),
        "torch": _is_short,
        "model": _is_short,
        "compute_capability": _is_short,
        "rack": _is_short,
        "location": _each(_is_short),
        "uuid": _is_short,
        "sandbox": _each(is_id),
        "limits": _each(is_id),
        "unlimited": _each(is_id),
        "capabilities": _each(is_id),
        "clock_began_s": _is_count,
        "protocol": _is_count,
        "splice": lambda value: isinstance(value, bool),
        "image_key": lambda value: isinstance(value, bool),
        "paced": lambda value: isinstance(value, bool),
        "pulses": lambda value: isinstance(value, bool),
        "host_news": lambda value: isinstance(value, bool),
        "user": lambda value: isinstance(value, bool),
        "ranks_apart": lambda value: isinstance(value, bool),
        "held_bytes": _by_name(is_id, lambda pair: _each(_is_count)(pair) and len(pair) == 2),
    },
)

_SECRETS = _object(
    {}, {"mark": _is_short, "sealed": lambda it: isinstance(it, str), "refused": _is_sentence}
)
_RANKED = _object({"step": _is_count, "value": lambda it: it is None or _is_finite(it)})
_FINDING = _object({"rule": is_word, "verdict": is_word, "effect": is_word, "reason": _is_sentence})
_HEALTH = _object(
    {},
    {
        "checked": lambda value: value == -1 or _is_count(value),
        "reading": _by_name(is_word, _is_figure),
        "idle": lambda value: isinstance(value, bool),
        "findings": lambda value: _each(_FINDING)(value) and len(value) <= FINDINGS_MOST,
    },
)

# --- fields ---------------------------------------------------------------------------------------

#: The check of a field, in every message.
FIELDS: dict[str, Check] = {
    "task": is_id,
    "epoch": _is_count,
    "seq": _is_count,
    "device": is_id,
    "incarnation": _is_name,
    "processes": _each(_is_process),
    "sent_us": _is_count,
    "step": _is_count,
    "held_us": _is_count,
    "tenant": is_id,
    "user": _text(_ID, or_none=True),
    "bundle": _is_bundle,
    "preset": _is_preset,
    "inputs": _by_name(is_word, _SOURCE),
    "images": _each(_IMAGE),
    "seats": _each(_is_count),
    "guests": _each(is_id),
    "secrets": _SECRETS,
    "image_key": _IMAGE_KEY,
    "successor": _text(_ID, or_none=True),
    "notice_us": _is_count,
    "why": _text(_WORD, or_none=True),
    "noticed": _text(_WORD, or_none=True),
    "matched": _by_name(lambda it: isinstance(it, str) and len(it) <= MOST_PATTERN, _is_sentence),
    "exit_status": lambda value: value is None or (_is_count(value) and value <= 255),
    "sha256": _is_hash,
    "size_bytes": _is_count,
    "new_bytes": _is_count,
    "output": is_word,
    "outputs": _OUTPUTS,
    "port": is_word,
    "kept": _object(_KEPT, {"format": _text(_FORMAT)}),
    "source": _SOURCE,
    "expect": _each(_EXPECTED),
    "next": _each(is_id),
    "keep": _each(_is_place_of_task),
    "drop": _each(_is_place_of_task),
    "ahead": _each(_AHEAD),
    "hung": _each(_is_place_of_task),
    "grace_us": _is_count,
    "health": _HEALTH,
    "check": _is_count,
    "report": _is_count,
    "answer": _is_count,
    "progress": _are_progresses,
    "mounts": _by_name(is_id, is_path),
    "root": lambda value: value == "" or is_path(value),
    "environments": _each(_is_hash),
    "points": _each(_is_point),
    "peaks": _by_name(is_word, _is_count),
    "waits_for": lambda value: value in ("", "bytes", "places", "disk"),
    "network": _by_name(is_word, _is_count),
    "withdrawn": _each(_is_sentence),
    "bound_because": _is_sentence,
    "unstored": _is_sentence,
    "behind": _is_sentence,
    "wait_us": _is_count,
    "dropped": _object(
        {},
        {
            "files": _is_count,
            "bytes": _is_count,
            "first": lambda value: _each(_is_file_name)(value) and len(value) <= FILES_MOST,
        },
    ),
    "printed": lambda value: _each(_is_count)(value) and len(value) in (0, 2),
    "ranked": lambda value: value == {} or _RANKED(value),
    "peers": _each(_is_hash),
    "secret": _is_bundle,
    "facts": _FACTS,
    "lines": _each(lambda line: _each(lambda part: isinstance(part, str))(line) and len(line) == 2),
}

#: The check of a field in those messages in which its name has another meaning.
ELSEWHERE: dict[tuple[str, str], Check] = {
    ("Launch", "links"): _JOINED,
    ("Resize", "links"): _JOINED,
    ("Alive", "links"): _is_place,
    ("HostPulses", "pulses"): _each(_is_pulse),
    ("Answer", "images"): _by_name(is_id, is_path),
    ("Launch", "mounts"): _by_name(is_path, is_path),
}

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "JSON": (dict,),
    "dict": (dict,),
    "list": (list,),
    "TaskDescriptor": (dict,),
}


def check(kind: str, types: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Raise BadMessage if a field does not have its type in `types`, or is not well formed."""
    for name, value in values.items():
        wanted, may_be_none, is_good = _form(kind, name, types[name])
        if value is None and may_be_none:
            continue
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise BadMessage(f"{kind}.{name} is {value!r:.100}")
        if is_good is not None and not is_good(value):
            raise BadMessage(f"{kind}.{name} is not well formed: {value!r:.100}")


@cache
def _form(kind: str, name: str, declared: str) -> tuple[tuple[type, ...], bool, Check | None]:
    """Return the types of a field, whether it may be None, and its check."""
    plain = declared.removesuffix(" | None")
    wanted = _TYPES[plain.partition("[")[0]]
    return wanted, plain != declared, ELSEWHERE.get((kind, name)) or FIELDS.get(name)

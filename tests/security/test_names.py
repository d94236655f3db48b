"""No hostile name in a message becomes a path or a key: decoding the message refuses it."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.core.model.protocol.messages import _KINDS, BadMessage, Finished, Launch, decode, encode
from tests.core.model.protocol.test_messages import sample

pytestmark = pytest.mark.security

HOSTILE = [
    "../../../store", "..", ".", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "", " a", "-rf",
    "x" * 5000, "a:b", "~root", "%2e%2e", "\uff0e\uff0e", "\ud800", 7, None, True, [], {}, ["a"],
]  # fmt: skip

#: Message kinds and the path to a name in them; `KEY` stands for the name of a member.
KEY = object()
NAMES: list[tuple[str, list[Any]]] = [
    *(("Launch", [name]) for name in ("task", "tenant")),
    ("Launch", ["bundle"]),
    ("Launch", ["inputs", KEY]),
    ("Launch", ["inputs", "x", "sha256"]),
    ("Launch", ["inputs", "x", "copies", 0, "key"]),
    ("Launch", ["spec", "name"]),
    ("Launch", ["spec", "outputs", 0]),
    ("Launch", ["spec", "publish", KEY]),
    ("Launch", ["images", 0, "sha256"]),
    ("Launch", ["links", "secret"]),
    ("Launch", ["preset", KEY]),
    ("Pause", ["task"]),
    ("Given", ["port"]),
    ("Given", ["source", "sha256"]),
    ("Answer", ["mounts", KEY]),
    ("Answer", ["device"]),
    ("Answer", ["expect", 0, "task"]),
    ("Answer", ["expect", 0, "tenant"]),
    ("Answer", ["expect", 0, "bundle"]),
    ("Answer", ["expect", 0, "inputs", 0, "sha256"]),
    ("Answer", ["drop", 0, 0]),
    ("Answer", ["next", 0]),
    ("Answer", ["peers", 0]),
    ("Alive", ["device"]),
    ("Alive", ["facts", "host"]),
    ("Alive", ["facts", "key"]),
    ("Alive", ["ahead", 0, "sha256"]),
    ("Alive", ["residents", 0, "task"]),
    ("Alive", ["logs", 0, "task"]),
    ("Pulse", ["device"]),
    ("LeaseRenewal", ["device"]),
    ("ReportWanted", ["device"]),
    ("Saved", ["sha256"]),
    ("Stored", ["output"]),
    ("Stored", ["kept", "sha256"]),
    ("Finished", ["outputs", KEY]),
    ("Finished", ["outputs", "x", "sha256"]),
    ("Failed", ["outputs", "artifacts.zip", "sha256"]),
]

#: Names that may be empty, which then means none.
MAY_BE_EMPTY = {"bundle", "secret"}


def spoilt(kind: str, way: list[Any], name: Any) -> Any:
    """Return a valid message with one name replaced."""
    body = copy.deepcopy(encode(sample(_KINDS[kind])))
    *on_the_way, last = way
    inner = body
    for step in on_the_way:
        inner = inner[step]
    if last is KEY:
        inner[name] = next(iter(inner.values()))
    else:
        inner[last] = name
    return body


@pytest.mark.parametrize(
    ("kind", "way"),
    NAMES,
    ids=lambda it: (
        it if isinstance(it, str) else ".".join("KEY" if part is KEY else str(part) for part in it)
    ),
)
def test_hostile_name_is_refused(kind: str, way: list[Any]) -> None:
    decode(encode(sample(_KINDS[kind])))
    for name in HOSTILE:
        if way[-1] is KEY and not isinstance(name, str):
            continue
        if name == "" and way[-1] in MAY_BE_EMPTY:
            continue
        with pytest.raises(BadMessage):
            decode(spoilt(kind, way, name))


@pytest.mark.parametrize(
    "path", [name for name in HOSTILE if name != "/etc/passwd"] + ["/a/../b", "/a/", "//a", "/."]
)
def test_path_of_a_mount_that_is_not_plain_is_refused(path: Any) -> None:
    """Which paths a host shows is up to its roots (`workers.process.isolation.host_mounts`)."""
    for kind, way in (("Launch", ["mounts", "/data"]), ("Answer", ["mounts", "imagenet"])):
        with pytest.raises(BadMessage):
            decode(spoilt(kind, way, path))


@pytest.mark.parametrize(
    "run",
    [
        {}, {"job": "a:b", "command": []}, {"command": "sh"}, {"command": [1]}, {"job": "../a:b"},
        {"graph": "sha256:../../store"}, {"graph": "0" * 64}, {"function": "os.path:__", "x": 1},
        {"graph": {"nodes": []}}, "m:J", None, 7,
    ],
)  # fmt: skip
def test_entry_point_has_one_of_four_forms(run: Any) -> None:
    body = encode(sample(Launch))
    with pytest.raises(BadMessage):
        decode({**body, "spec": {**body["spec"], "run": run}})


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.sampled_from(sorted(_KINDS)).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"is": st.just(kind)},
        optional={name: JSONS for name in encode(sample(_KINDS[kind])) if name != "is"},
    )
)


@given(JSONS | BODIES)
@example({"is": []})
@example({"is": "Alive", "residents": [{"is": "Pause", "task": "t", "epoch": 1, "seq": 1}]})
def test_any_json_is_a_message_or_refused(body: Any) -> None:
    with suppress(BadMessage):
        decode(body)


@given(st.sampled_from(sorted(_KINDS)), st.data())
def test_message_with_one_changed_value_is_a_message_or_refused(kind: str, data: Any) -> None:
    body = encode(sample(_KINDS[kind]))
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(JSONS)
    found = None
    with suppress(BadMessage):
        found = decode(body)
    assert (
        found is None
        or json.loads(json.dumps(encode(found))) == encode(found)
        or "NaN" in json.dumps(body)
    )


def test_outputs_of_an_event_may_be_artifacts_and_those_of_a_launch_may_not() -> None:
    kept = {"artifacts.zip": {"sha256": "0" * 64, "size_bytes": 1}}
    decode({**encode(sample(Finished)), "outputs": kept})
    with pytest.raises(BadMessage):
        decode({**encode(sample(Launch)), "outputs": ["artifacts.zip"]})

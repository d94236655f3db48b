"""Frames and tickets of tunnels, from both honest and hostile senders."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.provisions.tunnel import (
    CHANNELS_MAX,
    FRAME_BYTES,
    FRAME_HEAD,
    FROM_USER,
    BadFrame,
    BadTicket,
    FrameKind,
    TunnelTicket,
    frame_of,
    frame_of_message,
    message_of,
    why_not_into,
)
from tests.launches import launch_of

TICKET = TunnelTicket(tunnel="tun_1", task="tsk_1", epoch=1, kind="shell", expires_s=2_000_000_000)

words = st.lists(st.text(max_size=20), max_size=5).map(tuple)
tickets = st.builds(
    TunnelTicket,
    tunnel=st.text(max_size=40),
    task=st.text(max_size=40),
    epoch=st.integers(0, 2**40),
    kind=st.just("shell"),
    expires_s=st.integers(0, 2**40),
    words=words,
    rows=st.integers(1, 1000),
    columns=st.integers(1, 1000),
)


@given(tickets)
def test_ticket_reads_back_as_it_was_written(ticket):
    assert TunnelTicket.decoded(ticket.encoded()) == ticket


@given(st.binary(max_size=200) | st.from_regex(r"[\[{\"0-9:,}\]]{0,60}").map(str.encode))
def test_any_bytes_are_a_ticket_or_a_bad_one(body):
    with pytest.raises(BadTicket):
        TunnelTicket.decoded(body)


WRONG = [
    {"port": 22}, {"kind": "forward"}, {"kind": "forward", "port": 65536}, {"kind": "root"},
    {"rows": 0}, {"columns": 10**6}, {"rows": True}, {"epoch": -1}, {"epoch": "1"}, {"term": 5},
    {"words": ["x"] * 65}, {"words": ["x" * 1025]}, {"words": [1]}, {"words": "ls"}, {"more": 1},
    {"expires_s": 1.5}, {"words": None},
]  # fmt: skip


@pytest.mark.parametrize("more", WRONG, ids=str)
def test_ticket_with_a_value_out_of_range_is_refused(more):
    said = {**json.loads(TICKET.encoded()), **more}
    with pytest.raises(BadTicket):
        TunnelTicket.decoded(json.dumps(said).encode())


def test_ticket_of_a_port_needs_no_words():
    forward = replace(TICKET, kind="forward", port=8888)
    assert TunnelTicket.decoded(forward.encoded()) == forward


@given(st.sampled_from(sorted(FROM_USER)), st.integers(0, CHANNELS_MAX - 1), st.binary())
def test_message_becomes_the_frame_of_the_same_content(kind, channel, body):
    known, frame = frame_of_message(message_of(kind, channel, body))
    assert (known, frame) == (kind, frame_of(kind, channel, body))
    assert FRAME_HEAD.unpack_from(frame) == (kind, channel, len(body))


@given(st.binary(max_size=10))
def test_any_bytes_are_a_frame_or_a_bad_one(message):
    try:
        kind, frame = frame_of_message(message)
    except BadFrame:
        return
    assert kind in FROM_USER
    assert frame[FRAME_HEAD.size :] == message[3:]


def test_frames_that_are_too_long_or_not_the_users_are_refused():
    for message in (
        message_of(FrameKind.DATA, 0, bytes(FRAME_BYTES + 1)),
        message_of(FrameKind.DATA, CHANNELS_MAX),
        message_of(FrameKind.EXIT),
        message_of(FrameKind.OPENED),
        b"",
    ):
        with pytest.raises(BadFrame):
            frame_of_message(message)


@pytest.mark.parametrize(
    ("run", "kind", "milli", "told"),
    [
        ({"job": "m:J"}, "cpu", 1000, ""),
        ({"job": "m:J"}, "cuda", 1000, "a job with a cuda device"),
        ({"function": "m:f"}, "cpu", 500, "a function with a fraction of its device"),
        ({"command": ["true"]}, "cuda", 500, ""),
    ],
)
def test_nothing_runs_beside_a_job_whose_device_memory_is_counted(
    run: dict[str, object], kind: str, milli: int, told: str
) -> None:
    spec = launch_of("t", run=run, fraction_milli=milli).spec
    spec = replace(spec, devices=replace(spec.devices, kind=kind))
    why = why_not_into("running", spec)
    assert (told in why) if told else not why

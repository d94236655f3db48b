"""Lines of a task's output, as they are kept until the island has them."""

from __future__ import annotations

import pytest

from workers.device.log_buffer import LINE_LIMIT_BYTES, LOG_LIMIT_BYTES, Log


def lines(log: Log) -> list[str]:
    return [text for _, text in log.waiting]


def test_a_progress_bar_becomes_its_last_frame():
    log = Log()
    for n in range(1, 129):
        log.write("stderr", f"\repoch 0: {n}/128".encode())
    log.write("stderr", b"\nnext")
    assert lines(log) == ["epoch 0: 128/128"]
    log.end()
    assert lines(log) == ["epoch 0: 128/128", "next"]


def test_a_progress_bar_that_never_ends_its_line_is_bounded_and_kept_at_the_end():
    log = Log()
    for n in range(2000):
        log.write("stdout", f"{n:063}\r".encode())
        assert len(log._open["stdout"]) <= 128 < LINE_LIMIT_BYTES
    assert lines(log) == []
    log.end()
    assert lines(log) == [f"{1999:063}"]


def test_line_ends_of_other_systems_lose_nothing():
    log = Log()
    log.write("stdout", b"one\r\ntwo\r")
    log.write("stdout", b"\nthree\r\r\n\r\n")
    assert lines(log) == ["one", "two", "three", ""]


TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 7', "ValueError: no"]


def flooded(*streams: str, size_bytes: int = 2 * LOG_LIMIT_BYTES) -> Log:
    log = Log()
    for stream in streams:
        for n in range(size_bytes // 65536):
            log.write(stream, b"".join(b"%d.%d\n" % (n, k) for k in range(8192)))
    return log


@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_last_words_after_a_flood_are_kept(streams):
    log = flooded(*streams)
    held_bytes = log.held_bytes
    log.write("stderr", "\n".join(["", *TRACEBACK]).encode())
    assert log.held_bytes == held_bytes < 2 * LOG_LIMIT_BYTES
    log.end()
    assert [text for stream, text in log.waiting if stream == "stderr"][-3:] == TRACEBACK
    assert [*log.last][-3:] == TRACEBACK
    printed = lines(log)
    assert printed[0] == "0.0"
    told = next(line for line in printed if "lines dropped" in line)
    kept = [line for line in printed if line[:1].isdigit()]
    numbered = int(told.split()[1])
    assert len(kept) + numbered == len(streams) * 8192 * (2 * LOG_LIMIT_BYTES // 65536)
    assert sum(map(len, kept[-64 * 1024 :])) >= 64 * 1024
    assert log.held_bytes < 3 * LOG_LIMIT_BYTES


def test_end_of_a_flood_follows_when_there_is_room():
    log = flooded("stdout")
    first = log.first
    log.write("stdout", b"last\n")
    assert "last" not in lines(log)
    log.acknowledged(first + len(log.waiting))
    assert lines(log)[-1] == "last"
    assert "lines dropped" in lines(log)[0]
    log.write("stdout", b"more\n")
    assert lines(log)[-1] == "more"


def test_flood_without_an_end_of_line_is_bounded():
    log = flooded("stderr")
    for _ in range(64):
        log.write("stdout", b"x" * 65536)
    log.write("stdout", b"\nlast\n")
    log.end()
    assert lines(log)[-1] != "x" * 65536
    assert "last" in lines(log)
    assert log.held_bytes < 2 * LOG_LIMIT_BYTES


def test_a_line_that_a_pause_cuts_stays_one_line():
    before, after = Log(), Log()
    before.write("stdout", b"first\nste")
    after.goes_on_from(before)
    before.end()
    after.write("stdout", b"p 2\n")
    assert lines(before) == ["first"]
    assert lines(after) == ["step 2"]


def test_a_line_that_an_image_cuts_goes_on_where_the_image_does():
    here, there = Log(), Log()
    here.write("stdout", b"first\nste")
    here.write("stderr", b"whole\n10 %\r20 %\xff")
    begun = here.begun
    here.leave_begun()
    here.end()
    there.begin_with(begun)
    there.write("stdout", b"p 2\n")
    there.end()
    assert lines(here) == ["first", "whole"]
    assert lines(there) == ["step 2", "20 %\ufffd"]

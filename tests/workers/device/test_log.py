"""Lines of a task's output, as they are kept until the island has them."""

from __future__ import annotations

from workers.device.log_buffer import LINE_LIMIT_BYTES, Log


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

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

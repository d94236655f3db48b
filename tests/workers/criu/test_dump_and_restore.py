"""What a user is told of a dump that failed."""

from __future__ import annotations

from workers.criu import dump_and_restore


def told(folder, log: str) -> str:
    (folder / dump_and_restore.LOG).write_text(log)
    return dump_and_restore._reason(dump_and_restore.Target(pidfd=-1, images=folder, limit_s=60), 1)


def test_first_error_that_counts_is_told(tmp_path):
    log = "Error (criu/tun.c:9): tun: none\nError (criu/files.c:1): no file\nError (a:2): late\n"
    assert told(tmp_path, log) == "no file"


def test_process_that_waits_in_the_kernel_is_told_in_words(tmp_path):
    log = "Error (criu/seize.c:1): Timeout reached. Try to interrupt: 0\nError (a:2): late\n"
    assert told(tmp_path, log).startswith("a process does not stop, for it waits in the kernel")

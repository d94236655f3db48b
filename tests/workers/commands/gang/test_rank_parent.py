"""A rank parent starts the ranks of a command, and says how each of them ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from workers.commands.gang import rank_parent, rank_tree
from workers.commands.gang.rank_tree import RankTree

AGAIN = 75


def begun(folder: Path, script: str, ranks: int = 3, **more) -> RankTree:
    environments = [{"RANK": str(rank), "PATH": os.environ["PATH"]} for rank in range(ranks)]
    ends = folder / more.pop("ends", "ends")
    return RankTree.begun(["bash", "-c", script], str(folder), environments, (), ends, AGAIN)


def test_ranks_have_their_environment_and_their_ends_are_told_in_order(tmp_path):
    tree = begun(
        tmp_path, "touch at$RANK; while [ ! -e at1 ]; do sleep 0.01; done; echo $$ > pid$RANK"
    )
    assert tree.root.wait() == 0
    told = tree.ended(tmp_path / "ends")
    assert sorted(told) == [(0, 0), (1, 0), (2, 0)]
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
    assert [rank.pid for rank in tree.ranks] == pids


def test_parent_ends_at_the_first_failure_and_names_it(tmp_path):
    tree = begun(tmp_path, "[ $RANK = 2 ] && exit 4; sleep 1000")
    assert tree.root.wait() == 4
    assert tree.ended(tmp_path / "ends") == [(2, 4)]
    for rank in tree.ranks[:2]:
        os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["again", "cancel"])
def test_parent_waits_for_all_ranks_that_may_clean_up(tmp_path, how):
    script = (
        "trap 'exit 75' TERM; touch at$RANK; while [ ! -e go$RANK ]; do sleep 0.01; done; exit 75"
    )
    tree = begun(tmp_path, script, 2)
    while not all((tmp_path / f"at{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    if how == "cancel":
        os.kill(tree.root.pid, signal.SIGTERM)
    for rank in range(2):
        (tmp_path / f"go{rank}").touch()
    assert tree.root.wait() == AGAIN
    assert sorted(tree.ended(tmp_path / "ends")) == [(0, AGAIN), (1, AGAIN)]


def test_status_of_the_parent_tells_the_end_where_the_disk_is_full(tmp_path):
    for code in (0, 7):
        tree = begun(tmp_path, f"exit {code}", ends="missing/ends")
        assert tree.root.wait() == code


def test_program_that_is_missing_is_told_as_by_popen(tmp_path):
    with pytest.raises(FileNotFoundError):
        RankTree.begun(["no-such"], str(tmp_path), [{"PATH": "/usr/bin"}], (), tmp_path / "e", None)


NONSENSE = ["", "{", "7", "[[9, 0]]", '[["x", 0]]', "[[0]]", "[[0, Infinity]]", "[" * 50_000]


@pytest.mark.parametrize("told", NONSENSE)
def test_ends_that_the_command_wrote_itself_are_read_with_care(tmp_path, told):
    tree = RankTree.adopted(None, {"ranks": [[1001, None], [1002, 0]]})
    (tmp_path / "ends").write_text(told)
    assert tree.ended(tmp_path / "ends") == []
    assert tree.about == {"ranks": [[1001, None], [1002, 0]]}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.with_name("other").write_text("[[0, 3]]")
    path.symlink_to("other")


def _endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)  # more than any memory


@pytest.mark.parametrize("put", [_pipe, _link, _endless, Path.mkdir])
def test_ends_that_are_no_small_file_are_passed_over_at_once(tmp_path, put):
    tree = RankTree.adopted(None, {"ranks": [[1001, None], [1002, 0]]})
    put(tmp_path / "ends")
    told = []
    reader = threading.Thread(target=lambda: told.append(tree.ended(tmp_path / "ends")))
    reader.daemon = True
    reader.start()
    reader.join(30.0)
    assert told == [[]]


def test_parent_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(rank_parent, "__file__", str(hangs))
    monkeypatch.setattr(rank_tree, "ANSWER_S", 0.2)
    made, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: made.append(popen(*a, **k)) or made[0])
    with pytest.raises(TimeoutError, match="does not answer"):
        begun(tmp_path, "exit 0")
    assert [process.returncode for process in made] == [-signal.SIGKILL]


@pytest.mark.parametrize("said", [b"[1]", b'{"pids": 7}', b'{"pids": ["x"]}', b"{", b"7" * 2**17])
def test_answer_of_a_parent_is_read_with_care(said):
    read, write = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(write, said), os.close(write)))
    writer.start()
    with pytest.raises(OSError, match="the process that starts its ranks"):
        rank_tree._begun_ranks(read, "a program")
    os.read(read, 2**20)  # what is left of a long one
    writer.join()
    os.close(read)


def test_answer_of_a_parent_has_its_ranks():
    read, write = os.pipe()
    os.write(write, json.dumps({"pids": [7, 8]}).encode())
    os.close(write)
    assert [rank.pid for rank in rank_tree._begun_ranks(read, "a program")] == [7, 8]
    os.close(read)

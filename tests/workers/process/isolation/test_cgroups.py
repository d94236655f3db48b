"""Control groups: where they lie, what is written, what is told when one does not stand.

What this host's kernel has is tried for real, here and in `tests/security/test_device_limits.py`.
Version 2 is also tried on a tree of plain files that looks like a delegated one, which shows which
file gets which text; that stands in where a host has version 1 only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.process.isolation import cgroups, group_owners, sandbox
from workers.process.isolation.cgroups import (
    Bounds,
    ControlGroups,
    GroupUsage,
    Hierarchy,
    hierarchies,
)

BOUNDS = Bounds.of(
    memory_bytes=1000,
    host_memory_bytes=200,
    overhead_bytes=30,
    residents_max=4,
    threads=3,
    nodes=(),
)
_V1 = """\
25 20 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw
26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
27 25 0:24 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
28 25 0:25 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
29 25 0:26 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
_V1_OWN = "3:memory:/a/b\n2:cpu,cpuacct:/\n1:name=systemd:/x\n0::/c\n"


def test_hierarchies_of_a_hybrid_host_are_found_with_the_group_in_each():
    assert hierarchies(_V1, _V1_OWN) == [
        Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct"), ("cpu",)),
        Hierarchy(1, Path("/sys/fs/cgroup/memory/a/b"), ("memory",)),
        Hierarchy(2, Path("/sys/fs/cgroup/unified/c"), ("memory", "processes", "cpu", "io")),
    ]


@pytest.mark.parametrize(
    ("root", "own", "found"),
    [
        ("/", "/user.slice/x.scope", "/sys/fs/cgroup/user.slice/x.scope"),
        ("/docker/1", "/docker/1", "/sys/fs/cgroup"),
        ("/docker/1", "/docker/1/worker", "/sys/fs/cgroup/worker"),
        ("/docker/1", "/docker/11", None),
        ("/", "/../other", None),
    ],
)
def test_a_group_in_a_container_is_found_below_what_is_mounted(root, own, found):
    mounted = f"30 25 0:26 {root} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
    paths = [hierarchy.own for hierarchy in hierarchies(mounted, f"0::{own}\n")]
    assert paths == ([] if found is None else [Path(found)])


def _delegated(root: Path, name: str, controllers: str) -> Path:
    """What the kernel would show of such a group, and of two below it."""
    files = {"memory": ("max", "swap.max", "oom.group"), "pids": ("max",)}
    files |= {"cpu": ("weight", "max"), "io": ("weight",)}
    for group in (root, root / name, root / name / "probe", root / name / "7"):
        group.mkdir()
        for file in ("procs", "subtree_control"):
            (group / f"cgroup.{file}").touch()
        for controller in controllers.split():
            for file in files[controller]:
                (group / f"{controller}.{file}").touch()
    (root / "cgroup.controllers").write_text(controllers)
    return root


def _made(root: Path, controllers: str, scheduler: str = "none [bfq]") -> ControlGroups:
    disk = root.parent / "block" / "vda" / "queue"
    disk.mkdir(parents=True)
    (disk / "scheduler").write_text(scheduler)
    groups = ControlGroups(name="roundhouse-h.0", bounds=BOUNDS, disks=root.parent / "block")
    limits = ("memory", "processes", "cpu", "io")
    groups.take([Hierarchy(2, _delegated(root, groups.name, controllers), limits)])
    return groups


def test_version_2_writes_each_bound_into_its_file(tmp_path):
    groups = _made(tmp_path / "own", "memory pids cpu io")
    assert groups.standing == ["memory", "processes", "cpu", "io"]
    assert groups.missing == {"devices": "this host has no such controller"}
    device = tmp_path / "own" / "roundhouse-h.0"
    assert groups.make("7") == [str(device / "7")]
    told = {
        "memory.max": "1320",
        "memory.swap.max": "0",
        "pids.max": "4000",
        "cpu.weight": "300",
        "io.weight": "100",
    }
    assert {name: (device / name).read_text() for name in told} == told
    told = {"memory.max": "1230", "memory.oom.group": "1", "pids.max": "1000"}
    assert {name: (device / "7" / name).read_text() for name in told} == told
    for group in (device.parent, device):
        handed = (group / "cgroup.subtree_control").read_text()
        assert handed == "+memory +pids +cpu +io"


def test_version_2_writes_the_limits_that_a_task_asked_for(tmp_path):
    groups = _made(tmp_path / "own", "memory pids cpu io")
    assert groups.limits_cpus()
    group = Path(groups.make("7", {"memory": 100, "cpus": 1500, "processes": 64})[0])
    # the kernel leaves room for an image of 200 bytes, and for processes of the platform
    told = {"memory.max": "300", "cpu.max": "150000 100000", "pids.max": "68"}
    assert {name: (group / name).read_text() for name in told} == told
    (group / "memory.stat").write_text("anon 90\nfile 500\nkernel 7\nshmem 20\n")
    (group / "pids.current").write_text("3\n")
    assert groups.usage("7") == GroupUsage(memory_bytes=110, processes=3)
    (group / "pids.peak").write_text("9\n")
    assert groups.usage("7").processes == 9
    (group / "pids.events").write_text("max 3\n")
    told_of = "It reached 64 processes and threads (its limit, resources.processes)."
    assert groups.refused("7") == told_of
    (group / "memory.events").write_text("oom_kill 1\nmax 9\n")
    told_of = "It used 120 B of 100 B of host memory (its limit, resources.memory_bytes)."
    assert groups.refused("7", held_bytes=120) == f"{told_of} The kernel ended it."


def test_weight_that_no_disk_obeys_is_reported_as_missing(tmp_path):
    groups = _made(tmp_path / "own", "memory pids cpu io", scheduler="[none] bfq")
    assert groups.standing == ["memory", "processes", "cpu"]
    assert "bfq" in groups.missing["io"]


def test_version_2_with_fewer_controllers_says_what_is_missing(tmp_path):
    groups = _made(tmp_path / "own", "pids")
    assert groups.standing == ["processes"]
    assert set(groups.missing) == {"memory", "cpu", "io", "devices"}
    assert "No such file" in groups.missing["memory"]


def test_version_2_without_any_controller_says_so(tmp_path):
    groups = _made(tmp_path / "own", "")
    assert not groups.standing
    assert "no controller was delegated" in groups.missing["memory"]


def test_counts_of_version_2_are_reported_in_a_sentence(tmp_path):
    groups = _made(tmp_path / "own", "memory pids cpu io")
    group = Path(groups.make("7")[0])
    assert groups.refused("7") == ""
    (group / "pids.events").write_text("max 3\n")
    assert groups.refused("7") == "It reached 1000 processes and threads (limit of this device)."
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 1\noom_kill 1\n")
    assert "The tasks on this device together" in groups.refused("7")
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
    assert "and was ended by the kernel." in groups.refused("7")


def test_groups_of_two_instances_with_a_device_of_one_name_differ():
    names = {cgroups.group_name("h.0", Path(f"/home/{user}/run")) for user in "ab"}
    assert len(names) == 2


def test_a_name_of_a_device_cannot_leave_its_folder():
    assert "/" not in cgroups.group_name("../../x/y", Path("/run"))


# --- on this host's kernel ------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlGroups]:
    """Up to 64 MiB for a resident."""
    monkeypatch.setattr(cgroups, "CLOSE_S", 60.0)  # a busy machine ends killed processes late
    bounds = Bounds(
        device_memory_bytes=2**27,
        resident_memory_bytes=2**26,
        residents_max=2,
        threads=1,
        nodes=tuple(sandbox.device_nodes(())),
    )
    made = ControlGroups.made("h.0", tmp_path, bounds)
    yield made
    made.close()
    assert made.name not in _all_groups()


def _all_groups() -> set[str]:
    """Return the names of all groups; those of other tests may go at any moment."""
    return {name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names}


def _in_child(joined: list[str], run: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        cgroups.join(joined)
        try:
            run()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _needs(groups: ControlGroups, limit: str) -> None:
    if limit not in groups.standing:
        pytest.skip(f"no limit of {limit} stands here: {groups.missing[limit]}")


def _eat() -> None:
    held = []
    while True:
        held.append(b"1" * 2**20)


def test_process_that_takes_too_much_memory_is_ended_and_counted(groups):
    _needs(groups, "memory")
    others = groups.make("2")
    assert _in_child(groups.make("1"), _eat) == -9
    assert groups.refused("1").startswith("It used more than 64.0 MiB of host memory")
    assert _in_child(others, lambda: None) == 0
    assert groups.refused("2") == ""


def test_a_device_node_that_is_not_allowed_cannot_be_opened(groups):
    _needs(groups, "devices")
    assert _in_child(groups.make("1"), lambda: os.close(os.open("/dev/null", os.O_RDWR))) == 0
    assert _in_child(groups.make("1"), lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY))) == 1


def test_a_device_with_many_threads_leaves_a_neighbour_its_share_of_a_core(groups, tmp_path):
    """Sixteen processes on one device and one on another, on one core for a second.

    Half of it is due to each device; one process in seventeen would have 6 %.
    """
    _needs(groups, "cpu")
    neighbour = ControlGroups.made("h.1", tmp_path, groups.bounds)
    begin, end = os.pipe()
    ready, told = os.pipe()
    joined = [*[groups.make("1")] * 16, neighbour.make("1")]
    spinning = [_spinning(each, begin, end, told) for each in joined]
    at = 0
    while at < len(spinning):
        at += len(os.read(ready, 100))
    os.close(end)  # all begin
    used_s = [os.wait4(child, 0)[2].ru_utime for child in spinning]
    neighbour.close()
    for fd in (begin, ready, told):
        os.close(fd)
    assert used_s[-1] > 0.25 * sum(used_s)


def _spinning(joined: list[str], begin: int, end: int, told: int) -> int:
    child = os.fork()
    if not child:
        os.close(end)
        cgroups.join(joined)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.write(told, b".")
        os.read(begin, 1)  # until the last writer is gone
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            pass
        os._exit(0)
    return child


def test_groups_of_a_killed_device_worker_are_ended_and_removed(groups, tmp_path):
    _needs(groups, "processes")
    left = groups.make("7")
    child = os.fork()
    if not child:
        cgroups.join(left)
        os.execv(sys.executable, [sys.executable, "-c", "input()"])
    while not any(str(child) in Path(one, "cgroup.procs").read_text() for one in left):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    after = ControlGroups.made("h.0", tmp_path, groups.bounds)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert after.standing == groups.standing
    after.remove("7")
    assert not after.left


_OWNER = """
import sys; from pathlib import Path
from tests.workers.process.isolation.test_cgroups import BOUNDS
from workers.process.isolation.cgroups import ControlGroups
made = ControlGroups.made("h.9", Path(sys.argv[1]), BOUNDS)
made.make("7")
print(*[parent for _, parent in made.parents], flush=True)
sys.stdin.read()
"""


def _owner(run: Path) -> tuple[subprocess.Popen[str], list[Path]]:
    """Start another device worker, as far as its groups go; returns its process and its groups."""
    words = [sys.executable, "-c", _OWNER, str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **pipes, cwd=Path(__file__).parents[4])
    return process, [Path(path) for path in process.stdout.readline().split()]


def test_empty_groups_of_killed_device_workers_are_removed_and_those_of_living_ones_stay(
    groups, tmp_path
):
    """A killed device worker whose groups hold a process keeps them until that process ends."""
    _needs(groups, "processes")
    owners = [_owner(tmp_path / name) for name in ("living", "killed", "busy")]
    (_, living), (killed, empty), (busy, held) = owners
    assert all(group.exists() for _, made in owners for group in made)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as inside:
        for group in held:
            (group / "7" / "cgroup.procs").write_text(str(inside.pid))
        for process in (killed, busy):
            process.kill()
            process.communicate()
        ControlGroups.made("h.1", tmp_path, groups.bounds).close()
        assert not [group for group in empty if group.exists()]
        assert all((group / "7").exists() for group in (*living, *held))
        assert inside.poll() is None
        inside.stdin.close()
    owners[0][0].communicate()
    gone = lambda: not [group for group in (*living, *held) if group.exists()]  # noqa: E731
    end_s = time.monotonic() + 60  # the kernel lets go of a group a moment after its last process
    while not gone():
        assert time.monotonic() < end_s
        ControlGroups.made("h.1", tmp_path, groups.bounds).close()


def test_owner_is_known_by_its_start_and_its_namespace():
    name = group_owners.owned_name("roundhouse-h.0-0417c06f")
    stem, pid, started, namespace = name.rsplit("-", 3)
    assert not group_owners.is_orphaned(name)
    assert group_owners.is_orphaned(f"{stem}-{pid}-{int(started) + 1}-{namespace}")
    assert not group_owners.is_orphaned(f"{stem}-{pid}-{int(started) + 1}-{int(namespace) + 1}")
    assert not group_owners.is_orphaned("roundhouse-h.0-0417c06f")


def test_groups_are_gone_when_closed_although_processes_lived_in_them(groups):
    """As when a device worker stops with jobs that are paused in memory."""
    _needs(groups, "processes")
    joined = groups.make("1")
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        cgroups.join(joined)
        os.write(told, b".")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    groups.close()
    assert not [parent for _, parent in groups.parents if parent.exists()]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    for fd in (ready, told):
        os.close(fd)


def test_counts_of_one_resident_are_not_those_of_the_next(groups):
    _needs(groups, "memory")
    assert _in_child(groups.make("1"), _eat) == -9
    assert groups.refused("1")
    groups.make("1")  # the device worker began to count anew
    assert groups.refused("1") == ""

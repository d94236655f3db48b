"""What a tenant's code can reach from inside; each probe is a real job in a real resident."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from app.core.model.protocol.messages import Finished
from tests.workers.conftest import ROOT
from workers.process.isolation import host_mounts, sandbox
from workers.process.isolation.sandbox import WALLS


@pytest.fixture
def found(rig):
    """What the job saw; the walls that stand here are in `walls`."""
    walls = set(rig.reports[-1].facts["sandbox"])
    paths = [
        str(rig.house.run.parent / "store"),
        str(rig.house.run),
        str(ROOT / "app"),
        "/etc/shadow",
    ]
    rig.launch("t1", "jobs:Look", params={"paths": paths})
    seen = rig.event(Finished, "t1").result
    return {**seen, "walls": walls}


@pytest.mark.usefixtures("fresh_zygotes")
def test_memory_of_a_sandboxed_process_can_be_watched(rig):
    if "overlap" not in rig.reports[-1].facts["capabilities"]:
        pytest.skip("this kernel cannot watch memory")
    rig.launch("t1", "large:watch_memory")
    assert rig.event(Finished, "t1").result == {"refused": 0, "before": 0, "after": 1}


@pytest.mark.usefixtures("fresh_zygotes")
def test_environment_has_no_secret(found):
    assert set(found["environment"]) <= {
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LD_LIBRARY_PATH"),
        *sandbox.ENVIRONMENT,
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY", "LC_CTYPE"),
    }


def test_process_sees_and_writes_only_its_own_files(found):
    if "files" not in found["walls"]:
        pytest.skip("this machine gives no mount namespaces")
    assert found["cwd"] == "/scratch"
    assert not [name for name, seen in found.items() if name.startswith("see ") and seen]
    assert not [name for name, done in found.items() if name.startswith("write ") and done]


def test_process_has_no_network(found):
    if "network" not in found["walls"]:
        pytest.skip("this machine gives no network namespaces")
    assert found["network"] is False


def test_process_sees_no_other_process(found):
    if "processes" not in found["walls"]:
        pytest.skip("this machine gives no process namespaces")
    assert found["pid"] == 1
    assert found["processes"] in ([1], [])


def test_process_in_a_pid_namespace_is_known_by_our_process_id(found):
    if "processes" not in found["walls"] or os.geteuid() != 0:
        pytest.skip("only root has them without a namespace of users")
    for walls, ids in ((["processes"], 1), ([], 0)):
        child = sandbox.fork(walls)
        if not child:
            os._exit(int(os.getpid() == 1))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ids


def test_process_can_run_a_program(found):
    assert found["shell"] == "hi\n"


def test_settings_of_java_are_shown():
    """Debian keeps them in /etc, and Java reads them before it opens a connection."""
    settings = {*Path("/etc").glob("java-*")}
    if not settings:
        pytest.skip("there is no Java here")
    assert settings <= {*sandbox._shown((), ())}


def test_process_can_gain_no_privileges(found):
    walls, status = found["walls"], found["status"]
    if "privileges" in walls:
        assert status["NoNewPrivs:"].strip() == "1"
    if "capabilities" in walls:
        assert int(status["CapEff:"], 16) == int(status["CapBnd:"], 16) == 0
    if "syscalls" in walls:
        assert status["Seccomp:"].strip() == "2"
        assert not found["unshare"]
    if "user" in walls:
        assert found["uid"] >= 200_000


@pytest.mark.usefixtures("fresh_zygotes")
def test_every_missing_layer_is_reported_with_its_reason(rig):
    walls = rig.reports[-1].facts["sandbox"]
    assert walls == [name for name in WALLS if name in walls]
    if os.geteuid() == 0 and Path("/proc/self/ns/user").exists():
        assert "privileges" in walls


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_worker_without_root_gets_all_layers_but_the_user(tmp_path_factory):
    """By a user namespace; where those are forbidden the walls are named as missing."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if python is None:
        pytest.skip("no interpreter here that another user may run")
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    try:
        _as_nobody(folder, python)
    finally:
        shutil.rmtree(folder)


@pytest.mark.usefixtures("fresh_zygotes")
def test_checkout_below_tmp_gets_the_same_layers(rig):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        probe = _checkout(Path(folder))
        if os.geteuid() == 0:
            os.chown(Path(folder) / "scratch", 9, 9)
        walls = subprocess.check_output([sys.executable, probe], text=True).split()
    assert walls == rig.reports[-1].facts["sandbox"]


@pytest.mark.usefixtures("fresh_zygotes")
@pytest.mark.parametrize("link", ["../real", "{}/real"])
def test_environment_behind_a_symbolic_link_gets_the_same_layers(rig, tmp_path, link):
    """A relative link once led nowhere in the new root, so that the layer `files` did not stand."""
    (tmp_path / "checkout").mkdir()
    probe = _checkout(tmp_path / "checkout")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "real"], check=True)
    (tmp_path / "checkout" / ".venv").symlink_to(link.format(tmp_path))
    if os.geteuid() == 0:
        os.chown(tmp_path / "checkout" / "scratch", 9, 9)
        for folder in (tmp_path, *list(tmp_path.parents)[:2]):
            folder.chmod(0o755)
    python = tmp_path / "checkout" / ".venv" / "bin" / "python"
    walls = subprocess.check_output([python, probe], text=True).split()
    assert walls == rig.reports[-1].facts["sandbox"]


def test_processes_of_the_host_are_not_taken_for_those_of_a_task(monkeypatch, tmp_path):
    """Without the layer `files` the host's /proc is seen, so there is no layer `processes`."""

    def broken(room: sandbox.Room) -> None:
        raise OSError(2, "broken for the test")

    monkeypatch.setitem(sandbox._INNER, "files", broken)
    for name in ("code", "scratch"):
        (tmp_path / name).mkdir()
    room = sandbox.Room(code=tmp_path / "code", scratch=tmp_path / "scratch", uid=os.geteuid())
    standing, missing = sandbox.try_out(room)
    assert not {"files", "processes"} & {*standing}
    assert {"files", "processes"} <= missing.keys()


def _checkout(folder: Path) -> Path:
    """With a program that says which walls stand there, for the user 9."""
    (folder / "workers" / "process" / "isolation").mkdir(parents=True)
    for module in (sandbox, host_mounts):
        shutil.copy(module.__file__, folder / "workers" / "process" / "isolation")
    for name in ("code", "scratch"):
        (folder / name).mkdir()
    script = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from pathlib import Path\n"
        "from workers.process.isolation import sandbox\n"
        f"here = Path({str(folder)!r})\n"
        "room = sandbox.Room(code=here / 'code', scratch=here / 'scratch', uid=9)\n"
        "print(*sandbox.try_out(room)[0])\n"
    )
    (folder / "probe.py").write_text(script)
    return folder / "probe.py"


def _as_nobody(folder: Path, python: str) -> None:
    probe = _checkout(folder)
    subprocess.run(["chown", "-R", "65534:65534", folder], check=True)
    done = subprocess.run(
        [python, probe],
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    walls = set(done.stdout.split())
    assert "user" not in walls
    assert {"limits", "capabilities", "privileges"} <= walls
    namespaces = {"processes", "ipc", "network", "files"}
    assert walls & namespaces in (namespaces, set())


def test_jobs_run_with_the_sandbox_off(rigs):
    rig = rigs(sandbox="off")
    assert rig.reports[-1].facts["sandbox"] == []
    rig.launch("t1", "jobs:Count", params={"steps": 3})
    rig.event(Finished, "t1")


def test_memory_of_a_freed_tensor_is_used_for_the_next_of_its_size():
    """Where crumbs beside it are cached, one run or another has place for nearly thirty."""
    assert max(map(_places, range(4))) < 20


def _places(seed: int) -> int:
    """How many tensors the heap of a run had place for, with never more than eight alive."""
    code = (
        f"from tests.workers.process.isolation.test_sandbox import come_and_go; come_and_go({seed})"
    )
    environment = {**os.environ, **sandbox.ENVIRONMENT}
    run = [sys.executable, "-c", code]
    return int(subprocess.check_output(run, env=environment, cwd=ROOT))


def come_and_go(seed: int) -> None:
    chance, size = random.Random(seed), 2**21
    live, small = [torch.empty(size)], list[torch.Tensor]()
    first = last = live[0].data_ptr()
    for _ in range(400):
        small += [torch.empty(chance.randrange(1, 60)) for _ in range(20)]
        del small[:-200:2]
        if len(live) == 8:
            del live[chance.randrange(8)]
        live.append(torch.empty(size))
        last = max(last, live[-1].data_ptr())
    sys.stdout.write(str((last - first) // (4 * size) + 1))

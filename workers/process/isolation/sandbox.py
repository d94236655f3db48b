"""Sandboxes a tenant's process: applies the layers in the forked child before any tenant code runs.

The child cannot exec a tool like bwrap, as it would lose all that the zygote has imported, so this
module makes the system calls itself.  A layer either works completely or does not count.  Each
device worker tries once at its start which layers work (`try_out`).  Every resident then gets
exactly these layers, or does not start.

A sandboxed process sees: the interpreter, its libraries and this package, its code (read-only, as
/code), its environment (read-only, as /environment), its scratch folder (/scratch, its home), its
own /tmp, a few devices, the mounts that it asked for and may use (read-only), no network.  It does
not see the Roundhouse home, the store, other processes, or any secret in its environment.  A
resident whose task may reach the network has a listener of the host's proxy on its own loopback.
A command in a container image sees the files of the image in place of the interpreter and the
libraries; its stub has all that it needs in memory.

The sandbox shares the kernel with the host.  Memory, processes and CPU are limited by control
groups (`workers.process.isolation.cgroups`), which a resident joins before the layers apply.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from workers.process.isolation import host_mounts
from workers.process.isolation.host_mounts import HostMount

CANNOT_START = 97  # exit status of a resident that could not be set up
CODE, SCRATCH, PACKAGES = Path("/code"), Path("/scratch"), Path("/environment")
PROXY_PORT, PROXY_BACKLOG = 3128, 128  # where a resident with a network finds its proxy
INPUTS = Path("/inputs")  # inputs that are folders, by port
PASSAGE = 0o711  # mode of a folder that others may pass through but not list

#: The environment of every process that runs tenant code; parts of it decide the bits of results.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",  # further threads would be lost in a fork
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
    """Lists what one resident gets of the host; `uid` is used only if this process is root.

    `passages` are our folders on the path to its code and scratch folder. `nodes` and `folders` are
    those of its device (`workers.process.isolation.device_access`).
    """

    code: Path
    scratch: Path
    uid: int
    nodes: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    passages: tuple[Path, ...] = ()
    # control groups (`workers.process.isolation.cgroups`) that the resident joins first
    groups: tuple[str, ...] = ()
    # mounts: folders of the host that the resident sees, read-only
    mounts: tuple[HostMount, ...] = ()
    environment: Path | None = None  # the packages that its request brings
    image: Path | None = None  # the root of its container image, in place of the host's files
    tmp_bytes: int = 2**30  # size of /tmp, and of /dev/shm
    processes: int = 1024  # most processes and threads, if the resident has a user of its own
    # file system image for its scratch folder (`workers.process.volumes`)
    template: Path | None = None
    # descriptor of the mount of its scratch folder, in the resident itself
    volume: int | None = None
    # descriptor, in the resident itself, of a socket that takes the listener of its proxy
    egress: int | None = None
    has_own_network: bool = False  # set when the layers apply

    def inside(self, walls: Iterable[str]) -> tuple[Path, Path]:
        """Return (code, scratch) as the resident sees them."""
        return (CODE, SCRATCH) if "files" in walls else (self.code, self.scratch)

    def environment_inside(self, walls: Iterable[str]) -> Path | None:
        """Return its environment as the resident sees it."""
        return PACKAGES if self.environment and "files" in walls else self.environment


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
    """Enter a user namespace and a PID namespace, before the resident itself is forked."""
    if _needs_user_namespace(walls):
        _own_user_namespace()
    if "processes" in walls:
        _unshare(_NEWPID)


def enclose(room: Room, walls: Iterable[str]) -> None:
    """Apply the layers inside the resident; called once.

    If it raises LayerBroken, the process must end.
    """
    room = replace(room, has_own_network="network" in walls)
    for name, raise_wall in _INNER.items():
        if name in walls:
            try:
                raise_wall(room)
            except OSError as error:
                raise LayerBroken(
                    f"the sandbox layer {name!r} could not be set up: {error}"
                ) from error
    _set_dumpable()  # changing the user has hidden the /proc of this process
    os.umask(0o077)


def enter(resident: int, walls: Iterable[str]) -> None:
    """Enter the namespaces of a resident, by its pidfd; raises OSError.

    The caller must then fork, since only a child is in the PID namespace, and call `confine` in the
    child.
    """
    kinds = sum(kind for name, kind in _NAMESPACES.items() if name in walls)
    _checked(_libc.setns(resident, kinds), "setns")


def confine(room: Room, walls: Iterable[str]) -> None:
    """Apply the layers that are not namespaces, in a process that has entered the namespaces of a
    resident.
    """
    room = replace(room, has_own_network="network" in walls)
    for name, raise_wall in _INNER.items():
        if name in walls and name not in _NAMESPACES:
            raise_wall(room)
    os.umask(0o077)


def environment(scratch: Path) -> dict[str, str]:
    return {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": "/tmp",
        "USER": "job",
        "LOGNAME": "job",
        # torch trusts the compiled code that it finds, so two tenants never share this folder
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/.torchinductor",
        "TRITON_CACHE_DIR": f"{scratch}/.triton",
    }


def enter_image() -> None:
    """Remove the variables that name programs and libraries of the host."""
    for name in _OF_HOST:
        os.environ.pop(name, None)
    os.environ["PATH"] = _IMAGE_PATH


def image_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a container image that its command gets.

    Variables for the home, temporary files and the network are left out: the sandbox decides these.
    """
    kept = ("HOME", "TMPDIR", "USER", "LOGNAME", *proxy_environment())
    return {name: value for name, value in variables.items() if name not in kept}


def proxy_environment() -> dict[str, str]:
    """Return the variables by which programs find the proxy of the task."""
    proxy, local = f"http://127.0.0.1:{PROXY_PORT}", "localhost,127.0.0.1,::1"
    given = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": local}
    return given | {name.upper(): value for name, value in given.items()}


# --- trying the layers ----------------------------------------------------------------------------


def try_out(room: Room) -> tuple[list[str], dict[str, str]]:
    """Return the layers that work here, and for each other layer the reason why not.

    Each layer is tried together with the working layers before it.
    """
    # so that no fork computes them again
    _shown(room.nodes, room.folders)
    if platform.machine() in _ARCHITECTURES:
        for has_own_network in (False, True):
            filter_program(has_own_network=has_own_network)
    standing: list[str] = []
    missing: dict[str, str] = {}
    for name in WALLS:
        why = _try([*standing, name], room)
        if why:
            missing[name] = why
            if name == "files":
                _open_passages(room)
                if "processes" in standing:
                    # else a process would find those of the host in /proc, under foreign ids
                    standing.remove("processes")
                    missing["processes"] = "its /proc needs the layer 'files'"
        else:
            standing.append(name)
    return standing, missing


def _open_passages(room: Room) -> None:
    """Let other users pass through our folders.

    A resident needs this if the layer `files` does not hide them.
    """
    if os.geteuid() == 0:
        for folder in room.passages:
            # If this fails, the layer `user` does not work, which is reported.
            with contextlib.suppress(OSError):
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | (PASSAGE & 0o077))


def _try(walls: list[str], room: Room) -> str:
    """Apply exactly these layers in a child process and check them; return "" or the error."""
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
    if room.egress is not None:
        _give_listener(room.egress)


def _give_listener(fd: int) -> None:
    """Give the host's proxy a listener in the network of this resident, and keep no descriptor of
    it.

    A socket stays in the network in which it was made, so only our own processes can connect to it.
    """
    with socket.socket(fileno=fd) as to_proxy, socket.socket() as listener:
        listener.bind(("127.0.0.1", PROXY_PORT))
        listener.listen(PROXY_BACKLOG)
        socket.send_fds(to_proxy, [b"!"], [listener.fileno()])


def _files(room: Room) -> None:
    """Make a new root with only the files named here."""
    _unshare(_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    nodes = {*_DEVICES, *room.nodes}
    shown = _shown(room.nodes, room.folders) if room.image is None else _of_device(room)
    trees = [(_tree(path, is_node=path in nodes), path) for path in shown]
    if room.image is not None:
        trees += [(_tree(path), Path("/") / path.name) for path in _top_of_image(room.image)]
    trees += [(_mounted(mount), Path(mount.target)) for mount in room.mounts]
    trees.append((_tree(room.code), CODE))
    if room.environment is not None:
        trees.append((_tree(room.environment), PACKAGES))
    scratch = _tree(room.scratch, writable=True) if room.volume is None else room.volume
    trees.append((scratch, SCRATCH))
    # All trees are held by descriptors, so it does no harm that this mount hides their paths.
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    root = Path("/tmp")
    # mounted before the trees, as this checkout may be below /tmp
    _give_tmp(root / "tmp", room.tmp_bytes)
    for fd, path in trees:
        _place(fd, f"{root}{path}")
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
    # the kernel counts per user, and the resident is about to get a user of its own
    if os.geteuid() == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (room.processes, room.processes))


def _user(room: Room) -> None:
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "only root can give a process another user")
    _empty_bounding_set()  # done while this process still may
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
    program = filter_program(has_own_network=room.has_own_network)
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
#: Names at the top of every sandbox that a container image cannot replace.
_OWN_TOP = frozenset({"code", "dev", "environment", "inputs", "proc", "scratch", "sys", "tmp"})
_IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OF_HOST = ("LD_LIBRARY_PATH", "CUDA_HOME")  # these name files that the image does not have
_TMP_FILES_MAX = 262_144
_LINKS_MOST = 40  # as the kernel's own bound for one path
_TERMINALS_MAX = 64
_DEVICES = tuple(
    Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom", "tty")
)


@cache
def _shown(nodes: tuple[Path, ...], folders: tuple[Path, ...]) -> list[Path]:
    """Return the paths of the host that a resident sees under the same names: those of every
    resident, and those of its device.
    """
    python = {
        sys.prefix,
        sys.base_prefix,
        *(sysconfig.get_paths()[p] for p in ("stdlib", "purelib")),
    }
    wanted = [*map(Path, _SYSTEM), *(Path("/etc") / name for name in _ETC)]
    wanted += sorted(Path("/etc").glob("java-*"))  # Debian links the settings of Java to there
    wanted += sorted(Path(p) for p in python)
    wanted.append(Path(__file__).parents[2])  # ranks of a command import it again
    wanted = [step for path in wanted for step in _steps_to(path)]
    wanted += [*_DEVICES, *nodes, *folders]
    shown: list[Path] = []
    for path in dict.fromkeys(wanted):
        below_another = any(
            path.is_relative_to(other) and not other.is_symlink() for other in shown
        )
        if not below_another and (path.exists() or path.is_symlink()):
            shown.append(path)
    return shown


def _steps_to(path: Path) -> list[Path]:
    """Return the symbolic links on the way to a path, and the path to which they lead.

    Nothing can be mounted below a link: it would be followed on the host, or lead nowhere yet.
    """
    links, at, left = list[Path](), Path("/"), list(path.parts[1:])
    while left and len(links) < _LINKS_MOST:
        at /= left.pop(0)
        if at.is_symlink():
            links.append(at)
            target = os.path.normpath(at.parent / os.readlink(at))
            at, left = Path("/"), [*Path(target).parts[1:], *left]
    return [*links, at.joinpath(*left)]


def overlaid(target: str, nodes: tuple[Path, ...], folders: tuple[Path, ...]) -> str:
    """Return a path of the sandbox that a mount at `target` would hide or lie in; "" if none."""
    for shown in (*_shown(nodes, folders), CODE, SCRATCH, PACKAGES, INPUTS, Path("/tmp")):
        if shown.is_relative_to(target) or Path(target).is_relative_to(shown):
            return str(shown)
    return ""


def trouble_in_image(image: Path, target: str) -> str:
    """Return why nothing can be shown at `target` in a container image; "" if it can.

    A target at the top of the image can be added; a deeper one must exist. No part of it may be a
    symbolic link: that would be followed on the host, because the image is not the root yet.
    """
    if Path(target).parts[1] in _OWN_TOP:
        return ""
    at = image
    for n, part in enumerate(Path(target).parts[1:]):
        at /= part
        if at.is_symlink():
            return f"in the container image /{at.relative_to(image)} is a symbolic link"
        if not at.exists():
            return "" if n == 0 else f"the container image lacks the folder {target}"
        if not at.is_dir():
            return f"in the container image /{at.relative_to(image)} must be a folder"
    return ""


def _top_of_image(image: Path) -> list[Path]:
    """Return the names at the top of a container image, except those that every sandbox has."""
    return [path for path in sorted(image.iterdir()) if path.name not in _OWN_TOP]


def _of_device(room: Room) -> list[Path]:
    """Return the paths of the host that a resident in a container image sees: devices and their
    files.
    """
    wanted = [*_DEVICES, *room.nodes, *room.folders]
    if lost := [path for path in wanted if path.parts[1] not in _OWN_TOP]:
        told = f"{lost[0]} of the device cannot be shown in a container image"
        raise OSError(errno.ENOTSUP, told)
    return [path for path in dict.fromkeys(wanted) if path.exists()]


def shown_paths(room: Room) -> list[Path]:
    """Return the paths of the host that a resident sees read-only, except its code."""
    shown = [*_shown(room.nodes, room.folders), *(Path(mount.target) for mount in room.mounts)]
    return [*shown, PACKAGES] if room.environment is not None else shown


def device_nodes(own: Iterable[Path]) -> list[Path]:
    """Return the device nodes that a resident may open, even without a layer that hides the others.

    `own` are the nodes of its device.
    """
    wanted = [*_DEVICES, Path("/dev/ptmx"), *own]
    return [path for path in wanted if path.exists()]


def _tree(path: Path, *, writable: bool = False, is_node: bool = False) -> int | str:
    """Return a detached copy of the mount at `path`; for a symbolic link its target.

    A device node is never read-only, as it would be useless.
    """
    if path.is_symlink():
        return os.readlink(path)
    wanted = _MOUNT_ATTR_NOSUID | (0 if is_node else _MOUNT_ATTR_NODEV)
    wanted |= 0 if writable or is_node else _MOUNT_ATTR_RDONLY
    return _clone(_AT_FDCWD, os.fsencode(path), wanted, str(path))


def _mounted(mount: HostMount) -> int:
    """Return a detached, read-only copy of the tree of a mount.

    Errors do not name its path on the host.
    """
    try:
        folder = host_mounts.opened(mount)
    except OSError as error:
        raise OSError(error.errno, f"the mount at {mount.target}: {error.strerror}") from None
    try:
        wanted = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | _MOUNT_ATTR_RDONLY
        return _clone(folder, b"", wanted, mount.target)
    finally:
        os.close(folder)


def _clone(at: int, path: bytes, wanted: int, told: str) -> int:
    """Return a detached copy of the mount at `path` and all mounts below, with the attributes
    `wanted`.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE | (0 if path else _AT_EMPTY_PATH)
    fd = _libc.syscall(_SYS_OPEN_TREE, at, path, flags)
    _checked(fd, f"open_tree {told}")
    attributes = struct.pack("=QQQQ", wanted, 0, 0, 0)
    found = _libc.syscall(
        _SYS_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes, len(attributes)
    )
    _checked(found, f"mount_setattr {told}")
    return int(fd)


def _place(tree: int | str, target: str) -> None:
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if isinstance(tree, str):
        os.symlink(tree, target)
        return
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    moved = _libc.syscall(
        _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
    )
    _checked(moved, f"move_mount {target}")
    os.close(tree)


def _furnish(root: Path, room: Room) -> None:
    dev = root / "dev"
    if room.image is None:
        _furnish_etc(root / "etc")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (dev / name).symlink_to(target)
    (root / "proc").mkdir()
    _give_tmp(dev / "shm", room.tmp_bytes)
    _give_terminals(dev)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if room.uid == 0:  # /proc/sys belongs to root, also to a root without capabilities
        flags |= _MS_RDONLY
    try:
        _mount("proc", str(root / "proc"), "proc", flags)
    except PermissionError:
        # in a container that hides parts of /proc, the kernel refuses to mount another /proc
        return


def _furnish_etc(etc: Path) -> None:
    (etc / "passwd").write_text("root:x:0:0:::\njob:x:65534:65534::/scratch:\n")
    (etc / "group").write_text("root:x:0:\njob:x:65534:\n")
    if not (etc / "hosts").exists():  # the proxy of the host resolves names with the host's files
        (etc / "hosts").write_text("127.0.0.1 localhost job\n")


def _give_terminals(dev: Path) -> None:
    """Give the resident terminals of its own for shells, if the host can make them."""
    (dev / "pts").mkdir()
    bounds = f"newinstance,ptmxmode=0666,mode=0600,max={_TERMINALS_MAX}"
    with contextlib.suppress(OSError):
        _mount("devpts", str(dev / "pts"), "devpts", _MS_NOSUID | _MS_NOEXEC, bounds)
        (dev / "ptmx").symlink_to("pts/ptmx")


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
    # these give memory and queues outside all other limits, or ways around descriptors
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
_NEWEST = 470  # calls that later kernels add; they return ENOSYS
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_NEW_NAMESPACES = 0x7E020000  # any CLONE_NEW*
_FAMILIES = (1, 2, 10)  # unix, inet, inet6
# allowed protocols: the family's default, icmp, tcp, udp; not mptcp, not udplite
_PROTOCOLS = (0, 1, 6, 17)
_NETLINK, _ROUTE = 16, 0  # the family, and the protocol that lists interfaces and addresses
# With a lease a process delays other processes that open its file.  With SO_LINGER it delays the
# process that closes a socket received from it.
_FCNTL, _F_SETLEASE = (72, 25), 1024
_SETSOCKOPT, _SOL_SOCKET, _SO_LINGER = (54, 208), 1, 13

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


@cache
def filter_program(*, has_own_network: bool) -> bytes:
    """Return a seccomp program that allows all calls except the refused ones above.

    In a network of its own a process may list the interfaces, which gloo, NCCL and glibc's
    `getifaddrs` do by a netlink socket.  It has no capability to change them.
    """
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
    # A family that is "not available" (socket(2)) is one that libraries can do without: libzmq, of
    # every Jupyter kernel, would abort at another error.
    sockets = [*_route()] if has_own_network else []
    sockets += [*_only(16, _FAMILIES, errno.EINVAL), *_only(32, _PROTOCOLS, errno.EPERM)]
    lines += [(_EQUAL, 1, 0, _SOCKET[column]), (_EQUAL, 0, len(sockets), _SOCKETPAIR[column])]
    lines += [*sockets, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _route() -> list[tuple[int, int, int, int]]:
    """Return program lines that allow netlink sockets of this protocol, and refuse all others."""
    return [
        (_LOAD, 0, 0, 16), (_EQUAL, 0, 4, _NETLINK), (_LOAD, 0, 0, 32), (_EQUAL, 0, 1, _ROUTE),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
    ]  # fmt: skip


def _only(offset: int, allowed: tuple[int, ...], refusal: int) -> list[tuple[int, int, int, int]]:
    """Return program lines that refuse a call unless its argument at `offset` is one of the allowed
    values.
    """
    lines = [(_LOAD, 0, 0, offset)]
    lines += [(_EQUAL, len(allowed) - at, 0, value) for at, value in enumerate(allowed)]
    return [*lines, (_RETURN, 0, 0, _ERRNO | refusal)]


# --- the kernel -----------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_NAMESPACES = {
    "processes": _NEWPID,
    "ipc": _NEWIPC | _NEWUTS,
    "network": _NEWNET,
    "files": _NEWNS,
}
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
    """Have the kernel kill this process when its parent thread ends.

    Call it again after a change of user, which undoes it.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")


def _set_dumpable() -> None:
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def hide_memory() -> None:
    """Keep other processes of our user from reading our memory, also through /proc; exec undoes
    this.
    """
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

"""Ways out of the sandbox, tried one after another; each returns what it reached, or "".

`where` names the targets on the host: files, process ids and addresses.  The module runs inside a
resident, as the job `Probe`, and outside as a control.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import tempfile

FILES = [
    "keys", "signing key", "stored object", "store", "run folder", "neighbour's scratch",
    "code of the service", "password hashes", "state of the machine", "database", "message queue",
]  # fmt: skip
#: these are the kernel's or the machine's; nothing stands for them in `where`
MACHINE = [
    "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/fuse", "/dev/loop-control", "/dev/kvm",
    "/proc/kcore", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/sys/kernel/debug",
    "/sys/fs/cgroup/cgroup.procs", "/usr/probe", "/code/probe", "/etc/passwd",
]  # fmt: skip
PROCESSES = ["device worker", "zygote", "neighbour"]
FAMILIES = range(46)
NETLINK_PROTOCOLS = 32  # of the kernel; the first one is NETLINK_ROUTE
ALLOWED_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}

_libc = ctypes.CDLL(None, use_errno=True)


def called(number, *args):
    """Make a system call; raises OSError."""
    found = _libc.syscall(number, *args)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


# --- files ----------------------------------------------------------------------------------------


def see(path):
    return str(os.stat(path).st_ino)


def read(path):
    if os.path.isdir(path):
        return " ".join(os.listdir(path)) or "an empty folder"
    with open(path, "rb") as file:
        return f"{len(file.read(64))} bytes"


def see_from_root_of_self(path):
    return see(f"/proc/self/root{path}")


def see_from_root_of_process_1(path):
    return see(f"/proc/1/root{path}")


def see_by_climbing(path):
    folder = os.open("/scratch" if os.path.isdir("/scratch") else "/", os.O_RDONLY)
    try:
        return str(os.stat("../" * 12 + path[1:], dir_fd=folder).st_ino)
    finally:
        os.close(folder)


def read_through_symbolic_link(path):
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(path, f"{folder}/link")
        return read(f"{folder}/link")


def hard_link(path):
    with tempfile.TemporaryDirectory(dir=".") as folder:
        os.link(path, f"{folder}/link")
        return "linked"


def change_mode(path):
    os.chmod(path, os.stat(path).st_mode & 0o7777)
    return "changed"


def write(path):
    with open(path, "r+b" if os.path.exists(path) else "wb"):
        return "opened for writing"


READING = [see, read, see_from_root_of_self, see_by_climbing, read_through_symbolic_link]
CHANGING = [see_from_root_of_process_1, hard_link, change_mode, write]


# --- processes ------------------------------------------------------------------------------------


def _proc(name):
    def look(pid):
        path = f"/proc/{pid}/{name}"
        if os.path.isdir(path):
            return " ".join(os.listdir(path)) or "an empty folder"
        with open(path, "rb") as file:
            return f"{len(file.read(64))} bytes of {path}"

    look.__name__ = f"read /proc {name}"
    return look


def signal_0(pid):
    os.kill(pid, 0)
    return "is there"


def signal_continue(pid):
    os.kill(pid, signal.SIGCONT)
    return "sent"


def signal_group(pid):
    os.killpg(pid, 0)
    return "is there"


def open_process(pid):
    os.close(os.pidfd_open(pid))
    return "opened"


def read_memory(pid):
    called(310, pid, b"\0" * 16, 1, b"\0" * 16, 1, 0)
    return "read"


def attach(pid):
    called(101, 0x4206, pid, 0, 0)  # PTRACE_SEIZE, which does not stop the process
    return "attached"


def compare(pid):
    called(312, pid, os.getpid(), 0, 0, 0)
    return "compared"


def read_limits(pid):
    return str(resource.prlimit(pid, resource.RLIMIT_NOFILE))


def read_affinity(pid):
    return str(os.sched_getaffinity(pid))


def read_priority(pid):
    return f"priority {os.getpriority(os.PRIO_PROCESS, pid)}"


def change_priority(pid):
    os.setpriority(os.PRIO_PROCESS, pid, 0)
    return "changed"


LOOKING = [
    signal_0, open_process, read_limits, read_affinity, read_priority,
    *(_proc(name) for name in ("environ", "maps", "fd", "root", "cwd", "cmdline", "status")),
]  # fmt: skip
MEDDLING = [signal_continue, signal_group, read_memory, attach, compare, change_priority]


# --- the network ----------------------------------------------------------------------------------


def _stream(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(2)
        sock.connect(address)
        return f"connected to {address}"


def connect_ipv4(where):
    return _stream(socket.AF_INET, ("127.0.0.1", where["port"]))


def connect_any(where):
    return _stream(socket.AF_INET, ("0.0.0.0", where["port"]))


def connect_mapped(where):
    return _stream(socket.AF_INET6, ("::ffff:127.0.0.1", where["port"]))


def connect_by_name(where):
    return _stream(socket.AF_INET, ("localhost", where["port"]))


def connect_to_address_of_host(where):
    return _stream(socket.AF_INET, (where["address"], where["port"]))


def connect_abstract_socket(where):
    return _stream(socket.AF_UNIX, "\0" + where["abstract"])


def connect_postgres(where):
    return _stream(*_family(where["postgres"]))


def connect_redis(where):
    with socket.socket(_family(where["redis"])[0], socket.SOCK_STREAM) as sock:
        sock.settimeout(2)
        sock.connect(_family(where["redis"])[1])
        sock.sendall(b"PING\r\n")
        return sock.recv(64).decode()


def _family(address):
    if isinstance(address, str):
        return socket.AF_UNIX, address
    return socket.AF_INET, tuple(address)


def send_datagram(where):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((where["address"], where["port"]))
        sock.send(b"x")
        return "sent"


def connect_to_internet(where):
    return _stream(socket.AF_INET, ("1.1.1.1", 53))


def connect_to_metadata_of_cloud(where):
    return _stream(socket.AF_INET, ("169.254.169.254", 80))


def see_interfaces(where):
    found = [name for _, name in socket.if_nameindex() if name != "lo"]
    return " ".join(found)


def send_raw_packet(where):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
        return f"opened {sock.fileno()}"


def change_interface(where):
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", 0))
        return "changed"


LOCAL = [
    connect_ipv4, connect_any, connect_mapped, connect_by_name, connect_to_address_of_host,
    connect_abstract_socket, connect_postgres, connect_redis, see_interfaces,
]  # fmt: skip
FURTHER = [
    send_datagram, connect_to_internet, connect_to_metadata_of_cloud, send_raw_packet,
    change_interface,
]  # fmt: skip


def _socket_of(family):
    """Try to make a socket of a family; of netlink one of each protocol but that which lists
    interfaces, with which nothing can be changed.
    """
    protocols = range(1, NETLINK_PROTOCOLS) if family == socket.AF_NETLINK else (0,)

    def make(where):
        made = []
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            for protocol in protocols:
                with contextlib.suppress(OSError):
                    socket.socket(family, kind, protocol).close()
                    made.append(f"{kind.name} {protocol}".removesuffix(" 0"))
        return " ".join(made)

    return make


# --- more rights ----------------------------------------------------------------------------------


def become_root(where):
    os.setresuid(0, 0, 0)
    return "root"


def join_group_of_root(where):
    os.setresgid(0, 0, 0)
    return "group root"


def change_groups(where):
    os.setgroups([0])
    return "changed"


def run_setuid_program(where):
    path = os.path.join(tempfile.gettempdir(), "setuid")
    with open(path, "w"):
        os.chown(path, 0, 0)
        os.chmod(path, 0o4755)
        return "made"


def raise_limit(where):
    return _limited(resource.RLIMIT_NOFILE, 1 << 20)


def _limited(which, to):
    try:
        resource.setrlimit(which, (to, to))
    except ValueError as error:  # as Python says EPERM here
        return "" if "not allowed" in str(error) else f"reached the kernel: {error}"
    return "raised"


def write_core_files(where):
    return _limited(resource.RLIMIT_CORE, 1 << 20)


def gain_priority(where):
    return f"now {os.nice(-5)}"


def run_in_real_time(where):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "in real time"


def make_device_node(where):
    os.mknod("node", 0o020600, os.makedev(1, 1))
    return "made"


def change_name_of_host(where):
    socket.sethostname("else")
    return "changed"


def change_root(where):
    os.chroot("/")
    return "changed"


def mount(where):
    called(165, b"x", b"/tmp", b"tmpfs", 0, 0)
    return "mounted"


def mount_writable(where):
    called(165, 0, b"/", 0, 0x1020, 0)  # MS_REMOUNT | MS_BIND
    return "mounted"


def enter_namespaces_of_process_1(where):
    with open("/proc/1/ns/net") as file:
        called(308, file.fileno(), 0)
        return "entered"


def _new_namespace(flag):
    def make(where):
        child = os.fork()
        if not child:
            try:
                os.unshare(flag) if hasattr(os, "unshare") else called(272, flag)
                os._exit(0)
            except OSError:
                os._exit(1)
            finally:
                os._exit(2)
        return "" if os.waitpid(child, 0)[1] else "made"

    return make


def clone_with_new_namespaces(where):
    for flag in (0x00020000, 0x10000000, 0x20000000, 0x40000000):
        with contextlib.suppress(OSError):
            child = called(56, flag | signal.SIGCHLD, 0, 0, 0, 0)
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            return f"cloned with {flag:#x}"
    return ""


def clone3(where):
    try:
        called(435, 0, 0)
    except OSError as error:
        return "" if error.errno == errno.ENOSYS else f"reached the kernel: {error}"
    return "cloned"


def see_files_of_neighbour_in_shared_memory(where):
    found = [name for folder in ("/dev/shm", "/tmp") for name in os.listdir(folder)]
    return " ".join(name for name in found if name.startswith("neighbour"))


def see_other_processes(where):
    found = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return " ".join(found)


def regain_capabilities(where):
    _libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS, before all are asked for
    if _libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0xFFFFFFFF] * 6)):
        return ""
    return "regained"


def lift_no_new_privileges(where):
    return "" if _libc.prctl(38, 0, 0, 0, 0) else "lifted"


_NAMESPACES = {
    "mounts": 0x00020000, "users": 0x10000000, "processes": 0x20000000, "network": 0x40000000,
    "messages": 0x08000000, "names": 0x04000000, "control groups": 0x02000000,
}  # fmt: skip
RIGHTS = [
    become_root, join_group_of_root, change_groups, run_setuid_program, raise_limit,
    write_core_files, gain_priority, run_in_real_time, make_device_node, change_name_of_host,
    change_root, mount, mount_writable, enter_namespaces_of_process_1, clone_with_new_namespaces,
    clone3, see_files_of_neighbour_in_shared_memory, see_other_processes, regain_capabilities,
    lift_no_new_privileges,
]  # fmt: skip


# --- all of them ----------------------------------------------------------------------------------


def _bound(probe, *path):
    def run(where):
        target = where
        for word in path:
            target = target[word]
        return probe(target)

    return run


def _words(probe):
    return probe.__name__.replace("_", " ").strip()


#: probes that change nothing, and that reach their target where there is no sandbox
PLAIN = {
    **{f"{_words(p)}: {f}": _bound(p, "files", f) for f in FILES for p in READING},
    **{f"{_words(p)}: {name}": _bound(p, "pids", name) for name in PROCESSES for p in LOOKING},
    **{_words(probe): probe for probe in LOCAL},
}
PROBES = {
    **PLAIN,
    **{f"{_words(p)}: {f}": _bound(p, "files", f) for f in FILES for p in CHANGING},
    **{f"write: {path}": lambda where, path=path: write(path) for path in MACHINE},
    **{f"{_words(p)}: {name}": _bound(p, "pids", name) for name in PROCESSES for p in MEDDLING},
    **{_words(probe): probe for probe in FURTHER},
    **{
        f"socket of family {family}": _socket_of(family)
        for family in FAMILIES
        if family not in ALLOWED_FAMILIES
    },
    **{_words(probe): probe for probe in RIGHTS},
    **{f"new namespace of {name}": _new_namespace(flag) for name, flag in _NAMESPACES.items()},
}


def tried(probes, where):
    """Return what each probe reached, "" for one that was refused."""
    found = {}
    for name, probe in probes.items():
        try:
            found[name] = probe(where)
        except OSError:
            found[name] = ""
    return found


class Probe:
    def __init__(self, ctx, where):
        self.where = where

    def step(self, ctx):
        ctx.finish({"uid": os.getuid(), "reached": tried(PROBES, self.where)})


class Neighbour:
    """A job of another tenant with files of its own in each place where it may write."""

    def __init__(self, ctx):
        for folder in (".", "/tmp", "/dev/shm"):
            with open(f"{folder}/neighbour", "w") as file:
                file.write("secret")

    def step(self, ctx):
        import time

        print("steps", flush=True)
        time.sleep(0.05)

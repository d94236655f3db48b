"""Jobs that attack their device worker with the means of a tenant's process."""

import fcntl
import json
import os
import random
import signal
import socket
import stat
import struct
import threading
import time

SLAB_INDEX_BYTES = 24 * 2**20  # as in workers.process.slab
INDEX_BYTES = 20 * 2**20
F_ADD_SEALS, F_SETLEASE, F_NOTIFY, SO_LINGER = 1033, 1024, 1026, 13


def descriptors():
    """Return all open descriptors, except the descriptor of the listing itself."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if os.path.lexists(f"/proc/self/fd/{number}")]


def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def control():
    """Return a duplicate of the socket between this process and its device worker."""
    number = min(number for number in range(3, 64) if is_socket(number))
    return socket.socket(fileno=os.dup(number))


def framed(body):
    return struct.pack("!I", len(body)) + body


def frame(message):
    return framed(json.dumps(message).encode())


def progress(**more):
    said = {"step": 1, "metrics": {}, "memory_bytes": 0, "staged_us": 0}
    return frame({"is": "progress", **said, **more})


def send_all(sock, data):
    """Send as fast as the other side reads; returns when it no longer does."""
    sock.setblocking(True)
    try:
        while True:
            sock.sendall(data)
    except OSError:
        return


# --- the attacks in a job's second step -----------------------------------------------------------


def hold_descriptors():
    """Try on each descriptor everything that could make another holder wait, or die."""
    done = {}
    for number in descriptors():
        tries = {
            "flock": lambda n=number: fcntl.flock(n, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "lockf": lambda n=number: fcntl.lockf(n, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "truncate": lambda n=number: os.ftruncate(n, 0),
            "seal": lambda n=number: fcntl.fcntl(n, F_ADD_SEALS, 0xF),
            "lease": lambda n=number: fcntl.fcntl(n, F_SETLEASE, fcntl.F_RDLCK),
            "notify": lambda n=number: fcntl.fcntl(n, F_NOTIFY, 1),
            "async": lambda n=number: fcntl.fcntl(n, fcntl.F_SETFL, os.O_APPEND | os.O_ASYNC),
            "owner": lambda n=number: fcntl.fcntl(n, fcntl.F_SETOWN, os.getpid()),
            "pipe": lambda n=number: fcntl.fcntl(n, fcntl.F_SETPIPE_SZ, 4096),
        }
        for name, attempt in tries.items():
            try:
                attempt()
            except OSError:
                continue
            done.setdefault(name, []).append(os.readlink(f"/proc/self/fd/{number}"))
    print(json.dumps(done), flush=True)


def send_lingering_sockets():
    """Send the last descriptor of a socket with a close that waits until its peer has read."""
    wire = control()  # before there are sockets with lower numbers
    server = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    ours.setblocking(False)
    try:
        while True:
            ours.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    try:
        ours.setsockopt(socket.SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 1000))
    except OSError as error:
        print("refused", error, flush=True)
    else:
        print("lingers", flush=True)
    fds = [ours.detach(), theirs.detach()]
    socket.send_fds(wire, [frame({"is": "still"})], fds)
    for number in fds:
        os.close(number)
    time.sleep(3600)


def outlive_the_device():
    """Ask the kernel not to end this process with its parent."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    print("outlives", flush=True)


def send_descriptors():
    """Send with each byte of a frame as many descriptors as the kernel accepts."""
    sock = control()
    for byte in framed(bytes(60_000)):
        try:
            socket.send_fds(sock, [bytes([byte])], [1] * 250)
        except OSError:
            break
    time.sleep(3600)


def flood_with_lists():
    """Send frames with as many containers as fit."""
    flood(progress(metrics={str(n): [] for n in range(4_000)}))


def flood_with_short_lists():
    """Send frames that are only just accepted."""
    flood(progress(metrics={str(n): n for n in range(1_900)}))


def flood_with_short_frames():
    flood(frame({"is": "still", "step": 1}) * 1_000)


def flood_with_parts():
    """Send parts of a message that never completes."""
    flood(frame({"is": "part", "text": "[" * 50_000, "last": False}))


def send_huge_frame():
    flood(frame({"is": "progress", "metrics": [[] for _ in range(1_300_000)]}))


def nest_deeply():
    flood(framed(b'{"is": "progress", "metrics": ' + b"[" * 30_000))


def send_unended_strings():
    flood(framed(b'\\"' * 20_000))


def flood(data):
    sock = control()
    print("floods", flush=True)
    send_all(sock, data)
    time.sleep(3600)


def print_without_end():
    data = b"\n" * (1 << 16)
    while True:
        os.write(1, data)


def lie_about_memory():
    """Report more memory than any device has, then claim to be paused without an image."""
    sock = control()
    sock.sendall(progress(memory_bytes=2**61, spilled_bytes=2**61))
    print("lied", flush=True)
    await_word(b'"pause"')
    sock.sendall(frame({"is": "paused", "step": 1, "has_state": True}))
    time.sleep(3600)


def await_word(word):
    """Read the device worker's messages, before the resident does, until this word comes."""
    sock, heard = control(), b""
    while word not in heard:
        heard += sock.recv(1 << 16)


def never_read():
    print("deaf", flush=True)
    time.sleep(3600)


def send_index_of_lists():
    """Write an index of an image that is one long JSON text of empty lists."""
    slab = next(n for n in descriptors() if "slab" in os.readlink(f"/proc/self/fd/{n}"))
    at = os.fstat(slab).st_size - SLAB_INDEX_BYTES
    piece = b"[]," * (1 << 20)
    os.pwrite(slab, b'{"layout": [', at)
    for offset in range(12, INDEX_BYTES, len(piece)):
        os.pwrite(slab, piece[: INDEX_BYTES - offset], at + offset)
    said = {"step": 1, "what": "image", "at_step": 1, "index_bytes": INDEX_BYTES}
    control().sendall(frame({"is": "saving", **said}))
    time.sleep(3600)


def block_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def fork_children():
    """Start processes that leave their parent, and go on."""
    for _ in range(30):
        try:
            if not os.fork():
                os.setsid()
                if not os.fork():
                    time.sleep(3600)
                os._exit(0)
        except OSError:
            return


def fill_disk():
    with open("filled", "wb") as file:
        for _ in range(128):
            file.write(os.urandom(1 << 20))


def nest_folders():
    """Make folders nested deeper than a path may be long, or a recursion deep."""
    for _ in range(1_500):
        os.mkdir("d")
        os.chdir("d")
    os.chmod(".", 0)


def close_sockets():
    for number in descriptors():
        if is_socket(number):
            os.close(number)
    time.sleep(3600)


def send_garbage():
    dice, sock = random.Random(os.getpid()), control()
    sock.sendall(dice.randbytes(dice.choice((1, 3, 100, 100_000))))
    time.sleep(3600)


def close_descriptors():
    os.closerange(0, 4096)


def end_silently():
    os._exit(0)


def kill_everything():
    os.kill(-1, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def hold_the_interpreter():
    """Make one call that lets no other thread of this process run."""
    sum(range(10**12))


ATTACKS = {
    "block_signals": block_signals,
    "fork_children": fork_children,
    "fill_disk": fill_disk,
    "nest_folders": nest_folders,
    "close_sockets": close_sockets,
    "send_garbage": send_garbage,
    "close_descriptors": close_descriptors,
    "end_silently": end_silently,
    "kill_everything": kill_everything,
    "hold_the_interpreter": hold_the_interpreter,
    "flood_with_lists": flood_with_lists,
    "flood_with_short_lists": flood_with_short_lists,
    "flood_with_short_frames": flood_with_short_frames,
    "flood_with_parts": flood_with_parts,
    "send_huge_frame": send_huge_frame,
    "nest_deeply": nest_deeply,
    "send_unended_strings": send_unended_strings,
    "print_without_end": print_without_end,
    "lie_about_memory": lie_about_memory,
    "never_read": never_read,
    "send_index_of_lists": send_index_of_lists,
    "send_descriptors": send_descriptors,
    "hold_descriptors": hold_descriptors,
    "send_lingering_sockets": send_lingering_sockets,
    "outlive_the_device": outlive_the_device,
}


class Attack:
    """Steps, and attacks in its second step: in one way, or in several at once."""

    def __init__(self, ctx, do, nap_s=0.02):
        self.do, self.nap_s = do, nap_s

    def step(self, ctx):
        time.sleep(self.nap_s)
        if ctx.step == 2:
            first, *others = self.do.split("+")
            for name in others:
                threading.Thread(target=ATTACKS[name], daemon=True).start()
            ATTACKS[first]()
        return {"step": ctx.step}


class Steady:
    """A well-behaved neighbour, which prints when each step began."""

    def __init__(self, ctx, steps=10**9, nap_s=0.02):
        self.steps, self.nap_s = steps, nap_s

    def step(self, ctx):
        print(ctx.step, time.monotonic(), flush=True)
        time.sleep(self.nap_s)
        if ctx.step >= self.steps:
            ctx.finish({"steps": ctx.step})

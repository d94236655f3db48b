"""Blocks from host to host: who was launched to take one gets it, and whatever goes wrong costs no
more than a look into the store.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import threading
import time

import pytest

from app.core.model.protocol.messages import Finished, Started
from app.core.security import peer_proof
from app.storage.signing import block_key
from app.storage.store import Store
from tests.workers.conftest import DeviceRig
from tests.workers.transfer.test_peer_auth import Desk
from workers.transfer import peer_auth, peer_blocks
from workers.transfer.host_cache import Cache, Draft
from workers.transfer.peer_blocks import Giver, SharedPace

MB = 1 << 20
BODY = os.urandom(3 * MB + 17)
SHA256 = hashlib.sha256(BODY).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


def filled(folder, body=BODY, limit_bytes=64 * MB):
    cache = Cache(folder, limit_bytes)
    with Draft(cache) as draft:
        draft.write(body)
        draft.keep(hashlib.sha256(body).hexdigest())
    return cache


def read(fd):
    with os.fdopen(fd, "rb") as file:
        return file.read()


class Giving(Desk):
    """One that gives blocks."""

    def __init__(self, cache):
        self.giver = Giver(cache)
        super().__init__({peer_proof.BLOCK: self.giver})

    def copy(self, sha256=SHA256):
        """As a launch names it."""
        return {"place": self.links.place, "key": block_key(self.giver.secret, sha256)}

    def close(self):
        super().close()
        self.giver.close()


@pytest.fixture
def desk(tmp_path):
    desk = Giving(filled(tmp_path / "theirs"))
    yield desk
    desk.close()


@pytest.fixture
def mine(tmp_path):
    return Cache(tmp_path / "mine", 64 * MB)


class Peer:
    """One who listens where a block is said to be, knows its key, and then does as `says`."""

    def __init__(self, says):
        self._server, self._says = socket.create_server(("127.0.0.1", 0)), says
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def copy(self):
        return {"place": list(self._server.getsockname()), "key": "ab" * 32}

    def _run(self):
        sock, _ = self._server.accept()
        with sock:
            hello = peer_auth.read(sock, peer_proof.HELLO.size + peer_proof.NAME_BYTES)
            examination = peer_auth._examine(sock, bytes.fromhex("ab" * 32), hello)
            proof = peer_auth.read(sock, next(examination))
            with contextlib.suppress(StopIteration):  # it is believed
                examination.send(proof)
            self._says(sock)
            with contextlib.suppress(ConnectionResetError):
                sock.recv(1)  # until who asked has gone

    def close(self):
        self._server.close()
        self._thread.join()


@pytest.fixture
def peers():
    made = []

    def peer(says):
        made.append(Peer(says))
        return made[-1].copy

    yield peer
    for one in made:
        one.close()


def told(*parts, size=len(BODY)):
    """A peer that says that it has `size` bytes, and sends these."""

    def says(sock):
        sock.sendall(peer_blocks._SIZE.pack(size))
        for part in parts:
            sock.sendall(part)

    return says


# --- who gets it ----------------------------------------------------------------------------------


def test_host_with_the_key_gets_the_block_and_keeps_it(desk, mine):
    assert read(peer_blocks.taken([desk.copy()], SHA256, len(BODY), mine)) == BODY
    assert read(mine.held(SHA256)) == BODY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd := peer_blocks.taken([desk.copy()], SHA256, len(BODY), mine), b"x")
    os.close(fd)


def test_silent_host_is_waited_for_once_and_then_the_store_is_read(desk, mine, monkeypatch):
    at_desk = functools.partial(peer_auth.at_desk, timeout_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = {"place": list(mute.getsockname()), "key": "ab" * 32}
        with monkeypatch.context() as hurried:
            hurried.setattr("workers.transfer.peer_auth.at_desk", at_desk)
            assert peer_blocks.taken([silent, desk.copy()], SHA256, len(BODY), mine) is None
        mute.settimeout(60)
        mute.accept()[0].close()
        assert read(peer_blocks.taken([silent, desk.copy()], SHA256, len(BODY), mine)) == BODY
        mute.settimeout(0.1)
        with pytest.raises(TimeoutError):
            mute.accept()  # it was not asked again


def test_many_readers_take_a_block_at_once(desk, tmp_path):
    found = []

    def take(n):
        cache = Cache(tmp_path / f"mine-{n}", 64 * MB)
        found.append(read(peer_blocks.taken([desk.copy()], SHA256, len(BODY), cache)))

    threads = [threading.Thread(target=take, args=(n,)) for n in range(2 * peer_blocks.AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [BODY] * len(threads)


def test_connections_that_still_wait_are_closed_with_the_giver(mine):
    giver, go = Giver(mine), threading.Event()
    for _ in range(peer_blocks.AT_ONCE):
        giver._hands.submit(go.wait)
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(60)
        giver.serve(theirs, SHA256)
        closing = threading.Thread(target=giver.close)
        closing.start()
        assert ours.recv(1) == b""
    go.set()
    closing.join()


@pytest.mark.parametrize("key", ["00" * 32, "of another block", "of another worker"])
def test_host_without_the_key_gets_nothing(desk, mine, key):
    other = {
        "of another block": block_key(desk.giver.secret, OTHER),
        "of another worker": block_key("cd" * 32, SHA256),
    }
    copy = {**desk.copy(), "key": other.get(key, key)}
    assert peer_blocks.taken([copy], SHA256, len(BODY), mine) is None
    assert not mine.folder.exists()


def test_repeated_handshake_gets_nothing(desk):
    """Without the key there is no proof to give but the worker's own."""
    named = bytes.fromhex(SHA256)
    hello = peer_proof.HELLO.pack(bytes(16), 0, peer_proof.BLOCK, bytes(16)) + named
    with socket.create_connection(desk.links.place) as stranger:
        stranger.settimeout(60)
        stranger.sendall(hello)
        answer = peer_auth.read(stranger, peer_proof.CHALLENGE_BYTES + peer_proof.PROOF_BYTES)
        stranger.sendall(answer[peer_proof.CHALLENGE_BYTES :])
        assert stranger.recv(1) == b""


# --- what goes wrong on the way -------------------------------------------------------------------


def test_deleted_block_is_not_given(desk, mine):
    assert peer_blocks.taken([desk.copy(OTHER)], OTHER, 5, mine) is None


def test_refused_connection_falls_back_to_the_store(mine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = list(server.getsockname())
    assert peer_blocks.taken([{"place": place, "key": "ab" * 32}], SHA256, len(BODY), mine) is None


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(told(BODY[:-1], b"\x00"), id="other bytes"),
        pytest.param(told(size=len(BODY) + 1), id="more of them"),
        pytest.param(lambda sock: sock.shutdown(socket.SHUT_RDWR), id="not a word"),
        pytest.param(
            lambda sock: (told(BODY[:MB])(sock), sock.shutdown(socket.SHUT_WR)), id="half of them"
        ),
    ],
)
def test_wrong_bytes_are_not_taken(peers, mine, says):
    assert peer_blocks.taken([peers(says)], SHA256, len(BODY), mine) is None
    assert not any(mine.folder.iterdir())


@pytest.mark.parametrize("slow", ["stall", "rate"])
def test_slow_host_is_abandoned(peers, mine, monkeypatch, slow):
    monkeypatch.setattr(peer_blocks, "STALL_S", 0.5)
    if slow == "rate":  # each piece comes, all together come too late
        monkeypatch.setattr(peer_blocks, "SLOWEST_BYTES_PER_S", 10**12)
    ends = threading.Event()

    def says(sock):
        sock.sendall(peer_blocks._SIZE.pack(len(BODY)))
        while slow == "rate" and not ends.wait(0.1):
            try:
                sock.sendall(b"x")
            except OSError:
                break

    assert peer_blocks.taken([peers(says)], SHA256, len(BODY), mine) is None
    ends.set()


def test_another_copy_is_tried(peers, desk, mine):
    copies = [peers(told(size=0)), desk.copy()]
    assert read(peer_blocks.taken(copies, SHA256, len(BODY), mine)) == BODY


def test_block_too_large_for_the_cache_is_taken_all_the_same(desk, tmp_path):
    small = Cache(tmp_path / "small", len(BODY) - 1)
    assert read(peer_blocks.taken([desk.copy()], SHA256, len(BODY), small)) == BODY
    assert not any(small.folder.iterdir())


def test_full_disk_only_costs_a_read_of_the_store(desk, mine, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.transfer.host_cache.os.write", full)
    assert peer_blocks.taken([desk.copy()], SHA256, len(BODY), mine) is None
    assert not any(mine.folder.iterdir())


# --- what is kept ---------------------------------------------------------------------------------


class TestKept:
    def far(self, tmp_path, monkeypatch):
        """Not on the cache's file system."""
        monkeypatch.setattr(Cache, "_is_beside", lambda *_: False)
        return Store.at(tmp_path / "store")

    def test_stored_block_is_cached_on_this_host_too(self, tmp_path):
        store, cache = Store.at(tmp_path / "store"), Cache(tmp_path / "cache", 64 * MB)
        assert cache.stored([BODY[:MB], BODY[MB:]], len(BODY), store) == (SHA256, len(BODY))
        store.place.delete(f"blobs/{SHA256[:2]}/{SHA256}")
        assert read(cache.held(SHA256)) == BODY

    def test_block_stored_in_a_bucket_is_cached_too(self, tmp_path, monkeypatch):
        store, cache = self.far(tmp_path, monkeypatch), Cache(tmp_path / "cache", 64 * MB)
        assert cache.stored([BODY[:MB], BODY[MB:]], len(BODY), store) == (SHA256, len(BODY))
        assert read(cache.held(SHA256)) == BODY
        assert store.has(SHA256)

    def test_cache_drops_the_oldest_block_at_its_limit(self, tmp_path, monkeypatch):
        store, cache = self.far(tmp_path, monkeypatch), Cache(tmp_path / "cache", 250)
        kept = []
        for n in range(4):
            kept.append(cache.stored([bytes([n]) * 100], 100, store)[0])
            os.utime(cache.folder / kept[-1], (n, n))
            assert sum(file.stat().st_size for file in cache.folder.glob("*/*")) <= 250
        assert {entry.name for entry in cache.folder.iterdir()} == set(kept[2:])
        cache.stored([b"large" * 100], 500, store)
        assert {entry.name for entry in cache.folder.iterdir()} == set(kept[2:])

    def test_broken_cache_does_not_prevent_storing(self, tmp_path):
        store, cache = Store.at(tmp_path / "store"), Cache(tmp_path / "cache", 64 * MB)
        (tmp_path / "cache").write_text("no folder")
        assert cache.stored([BODY], len(BODY), store) == (SHA256, len(BODY))

    def test_unflushed_block_is_valid_until_the_machine_restarts(self, tmp_path, monkeypatch):
        cache = filled(tmp_path)
        monkeypatch.setattr(
            "workers.transfer.host_cache.boot_name", lambda: "body.of-the-next-boot"
        )
        assert cache.held(SHA256) is None
        assert read(filled(tmp_path).held(SHA256)) == BODY  # brought again


# --- how quickly ----------------------------------------------------------------------------------


def test_all_transfers_together_stay_within_the_bandwidth_limit(monkeypatch):
    """By a clock of its own: those who wait are let go one piece's time apart."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    pace = SharedPace(1000)
    for _ in range(11):
        pace.wait(100)
    assert clock[0] == pytest.approx(101.0 - peer_blocks.BURST_S)
    clock[0] += 60  # what was not used meanwhile is lost, but for a moment's
    for _ in range(11):
        pace.wait(100)
    assert clock[0] == pytest.approx(162.0 - 2 * peer_blocks.BURST_S)


# --- two device workers ---------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, each with a disk of its own, and one store."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "store").symlink_to(tmp_path / "a" / "store")
    made = [DeviceRig(tmp_path / name) for name in ("a", "b")]
    for rig in made:
        rig.open()
    yield made
    for rig in made:
        rig.close()


def made_on(rig):
    """An output of a task there: as a launch elsewhere names it."""
    rig.launch("maker", "blocks:tokens", outputs=["alone", "tokens"], publish=["tokens"])
    kept = rig.event(Finished, "maker").outputs["tokens"]
    told = rig.reports[-1]
    copy = {"place": told.links, "key": block_key(told.secret, kept["sha256"])}
    wanted = {name: kept[name] for name in ("sha256", "size_bytes", "format")}
    return {**wanted, "copies": [copy]}


def taken_on(rig, source):
    rig.launch("taker", "blocks:look", inputs={"x": source})
    seen = rig.event(Finished, "taker").result["seen"]
    started = rig.event(Started, "taker")
    return seen, started.ways, started.fetched_bytes


def test_task_on_another_host_takes_the_block_from_its_maker(hosts):
    a, b = hosts
    source = made_on(a)
    a.store.place.delete(f"blobs/{source['sha256'][:2]}/{source['sha256']}")
    assert taken_on(b, source)[1:] == ({"x": "host"}, 0)


def test_task_on_the_same_host_finds_the_block_there(hosts):
    a, _ = hosts
    assert taken_on(a, made_on(a))[1:] == ({"x": "here"}, 0)


def test_block_of_a_lost_maker_comes_from_the_store_with_the_same_bits(hosts):
    a, b = hosts
    source = made_on(a)
    on_a = taken_on(a, source)[0]
    a.close()
    seen, ways, fetched_bytes = taken_on(b, source)
    assert (seen, ways, fetched_bytes) == (on_a, {"x": "store"}, source["size_bytes"])

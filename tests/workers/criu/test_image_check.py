"""What CRIU may never see: each line is one image that was tampered with, and what is told."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.criu import made_image as made
from tests.workers.criu import two_stubs
from tests.workers.criu.made_image import ALLOWED, CHILD, FILTER, ROOT, THREAD, UID
from workers.criu import image_check, image_folder
from workers.criu.image_check import BadImage, CheckedTree, check
from workers.criu.image_owner import with_owner
from workers.criu.image_records import INVENTORY
from workers.process.isolation import sandbox


def test_image_of_a_confined_tree_passes():
    assert check(made.image(), ALLOWED) == CheckedTree(
        ROOT, {ROOT: (ROOT, THREAD), CHILD: (CHILD,)}
    )


def _root(own=None, machine=1, **shared):
    own = own or made.thread(made.creds())
    return {f"core-{ROOT}.img": made.core(own, made.task(**shared), machine)}


def _other_thread(field, value):
    own = {1: 0, 2: 0, 10: made.creds()} | {field: value}
    return {f"core-{THREAD}.img": made.core(own)}


def _place(folder, root):
    return {f"fs-{ROOT}.img": made.file(image_check.FS, {1: folder, 2: root})}


def _creds(**other):
    return _root(made.thread(made.creds(**other)))


def _thread(**other):
    return _root(made.thread(made.creds(), **other))


def _limit(number, hard):
    limits = [{1: 0, 2: 0}] * number + [{1: 0, 2: hard}]
    return _root(f8={1: limits})


def _open(path, **other):
    return {"files.img": made.files(made.regular(9, path, **other))}


def _tree(*records):
    return {"pstree.img": made.file(image_check.PSTREE, *records)}


def _unix(address, **other):
    entry = {1: 9, 6: 0, 9: made.NO_OWNER, 11: address} | made._by_number(other)
    return {"files.img": made.files({1: 5, 2: 9, 16: entry})}


def _pipe(**owner):
    entry = {1: 9, 2: 1, 3: 0, 4: made.NO_OWNER | made._by_number(owner)}
    return {"files.img": made.files({1: 2, 2: 9, 18: entry})}


def _ghost(uid=UID, gid=UID, mode=0o100600):
    record = {1: uid, 2: gid, 3: mode}
    return {"ghost-file-1.img": made.file(image_check.GHOST, record, rest=b"\xff" * 9)}


def _filters(*filters):
    return {"seccomp.img": made.file(image_check.SECCOMP, {1: list(filters)})}


def _inventory(**other):
    ids = {number: number for number in range(1, 13)}
    return {"inventory.img": made.file(INVENTORY, {1: 2, 3: ids} | made._by_number(other))}


def _ids(**other):
    ids = {number: number for number in range(1, 13)} | made._by_number(other)
    return {f"ids-{ROOT}.img": made.file(image_check.IDS, ids)}


ONE = {1: ROOT, 2: 0, 3: ROOT, 4: ROOT, 5: [ROOT, THREAD]}
TAMPERED = [
    # users and rights
    *[(_creds(**{f"f{field}": 0}), "it is of user or group 0") for field in range(1, 9)],
    (_creds(f1=UID + 1), f"core-{ROOT}.img: it is of user or group {UID + 1} instead of {UID}"),
    (_creds(f1=2**32), f"core-{ROOT}.img: a number has more than 32 bits"),
    (_creds(f3=[UID, 0]), f"core-{ROOT}.img: field 3 is not one number"),
    *[(_creds(**{f"f{field}": 1 << 21}), "it has capabilities") for field in (9, 10, 11, 12, 19)],
    (_creds(f12=[0, 1]), "it has capabilities"),
    (_creds(f9=b"\x00\x80\x01"), "it has capabilities"),  # packed
    (_creds(f14=0), "it is in group 0"),
    (_creds(f14=[UID, 27]), f"it is in group {UID}"),
    (_creds(f18=0), "it could gain privileges"),
    (_creds(f13=1), "it could gain privileges"),
    (_creds(f15="unconfined"), "it has a profile of a security module"),
    (_root({1: 0, 2: 0, 10: made.creds()}), "it has not the system call filter"),
    (_thread(f11=0), "it has not the system call filter of the sandbox"),
    (_thread(f11=1), "it has not the system call filter of the sandbox"),
    (_thread(f12=7), "it has not the system call filter of the sandbox"),
    (_thread(f4=1), "its scheduling policy is 1"),
    (_thread(f5=50), "its scheduling policy is 0"),
    (_thread(f3=39), "it is scheduled before others"),  # nice -20
    (_root(f1=7), "its state is 7"),
    (_root(f3=0x0200000), "its personality is 0x200000"),
    (_root(f14=2**64 - 1000), "the kernel would rather end other processes"),
    (_root(f11=0), "it has no system call filter"),
    (_limit(4, 1), "its limit 4 is above that of the sandbox"),
    (_limit(6, 1025), "its limit 6 is above that of the sandbox"),
    (_limit(7, 2**64 - 1), "its limit 7 is above that of the sandbox"),
    (_other_thread(10, made.creds(f2=0)), f"core-{THREAD}.img: it is of user or group 0"),
    (_other_thread(11, 1), f"core-{THREAD}.img: it has not the system call filter"),
    (_root(machine=3), "another kind of processor"),
    ({f"core-{ROOT}.img": made.core(made.thread(made.creds()))}, "field 3 is not one string"),
    ({f"core-{ROOT}.img": b""}, "does not begin as such a file"),
    ({f"core-{ROOT}.img": made.image()[f"core-{ROOT}.img"][:-1]}, "it is truncated"),
    # filters
    (_filters({1: b"all"}), "it has not the system call filter"),
    (_filters({1: FILTER}), f"core-{THREAD}.img: it has not the system call filter"),
    (_filters({1: FILTER + b"x"}, {1: FILTER}), "it has not the system call filter"),
    (_filters({1: b"all", 2: 0}), "a filter comes before the one that it adds to"),
    (_filters({1: b"all", 2: 5}), "a filter comes before the one that it adds to"),
    # the tree
    (_tree(ONE | {1: 1, 5: [1, THREAD]}), "an id is not above 1000"),
    (_tree(ONE | {4: 1}), f"process {ROOT} is in a group of the stub"),
    (_tree(ONE | {3: 1}), f"process {ROOT} is in a group of the stub"),
    (_tree(ONE), "its threads are not those of the core files"),
    (_tree(ONE, {1: CHILD, 2: 0, 3: ROOT, 4: ROOT, 5: CHILD}), "it is not one tree"),
    (_tree(ONE, {1: CHILD, 2: CHILD, 3: ROOT, 4: ROOT, 5: CHILD}), "is not there before it"),
    (_tree(ONE, {1: CHILD, 2: ROOT, 3: ROOT, 4: ROOT, 5: [CHILD, THREAD]}), "one of them twice"),
    (_tree(ONE, {1: CHILD, 2: ROOT, 3: ROOT, 4: ROOT, 5: [THREAD]}), "is not its own first thread"),
    # namespaces
    *[(_ids(**{f"f{field}": 99}), "it is in a namespace of its own") for field in range(5, 12)],
    (_inventory(f13="x; flush ruleset"), "inventory.img: the number of the dump is not one"),
    (_inventory(f6=1), "it needs a security module or a plugin"),
    (_inventory(f12={12: "cuda"}), "it needs a security module or a plugin"),
    (_inventory(f1=9), "the version of the image is 9"),
    *[
        ({name: b""}, "an image of a command has no such file")
        for name in (
            "netns-1.img", "mountpoints-13.img", "nftables-1.img", "iptables-1.img", "userns-1.img",
            "tmpfs-1.tar.gz.img", "ipcns-var-1.img", "cgroup.img", "binfmt-misc.img", "tty.img",
            "core-x.img", "core-01.img", "../core-1.img", "pages-1.img/x", "bpfmap-data.img",
            "PSTREE.img",
        )
    ],
    # files
    (_open("/etc/../root/.ssh"), "expected a plain absolute path"),
    (_open("root"), "expected a plain absolute path"),
    (_open("//scratch"), "expected a plain absolute path"),
    (_open(b"/scratch\0/x"), "expected a plain absolute path"),
    (_open("/root/key"), "/root/key is not visible in the sandbox"),
    (_open("/usrlocal"), "/usrlocal is not visible in the sandbox"),
    (_open("/usr/bin/sh", f2=1), "/usr/bin/sh would be open for writing"),
    (_open("/code/a.py", f2=2), "/code/a.py would be open for writing"),
    (_open("/scratchy", f2=2), "/scratchy would be open for writing"),
    (_open("/dev/kmsg", f2=2), "/dev/kmsg would be open for writing"),
    (_open("/proc/1/mem"), "/proc/1/mem is of a process outside the tree"),
    (_open(f"/proc/{ROOT}/mem", f2=2), "would be open for writing"),
    (_open("/proc/sys/kernel/core_pattern"), "is not visible in the sandbox"),
    (_open("/scratch/x", f9=1), "/scratch/x would come from outside"),
    (_open("/scratch/x", f5=made.NO_OWNER | {5: 1}), "signals of a file would be sent"),
    (_open("/scratch/x", f1=8), "an open file has two numbers"),
    (_pipe(f5=ROOT, f1=UID), "signals of a file would be sent by another user"),
    *[
        ({"files.img": made.files({1: kind, 2: 9})}, f"no open file of kind {kind}")
        for kind in (0, 10, 11, 12, 14, 15, 16, 19, 21, 99)
    ],
    (
        {"files.img": made.files({1: 13, 2: 9, 7: {1: 9, 3: 15, 11: made.NO_OWNER}})},
        "a netlink socket would be of another protocol",
    ),
    (_unix(b"/run/x\0"), "a socket would be made at /run/x"),
    (_unix(b"x\0", f14="/etc"), "a socket would be made at /etc/x"),
    (_unix(b"../../etc/x\0", f14="/scratch"), "expected a plain absolute path"),
    (_unix(b"/scratch/x\0", f13={1: 0, 2: 0, 3: UID}), "a socket would be of another user"),
    (_unix(b"", f6=1), "a socket would be joined to one outside"),
    (_ghost(uid=0), "ghost-file-1.img: it would be of another user"),
    (_ghost(gid=0), "ghost-file-1.img: it would be of another user"),
    (_ghost(mode=0o104755), "ghost-file-1.img: its mode is 104755"),
    (_ghost(mode=0o020666), "ghost-file-1.img: its mode is 20666"),
    ({"memfd.img": made.file(image_check.MEMFD, {1: "x", 2: 0, 3: UID})}, "memfd.img: it would be"),
    (_place(1, 2), "its root is not that of the sandbox"),
    (_place(50, 1), "its working folder is not an open file"),
    ({"files.img": made.files(made.regular(3, "/tmp/x"))}, "two open files have one number"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "told"), TAMPERED)
def test_image_that_was_tampered_with_is_refused_by_name(changed, told):
    with pytest.raises(BadImage) as caught:
        check(made.image() | changed, ALLOWED)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", sorted({*made.image()} - {"pages-1.img", f"fs-{CHILD}.img"}))
def test_image_without_one_of_its_files_is_refused(name):
    left = {other: data for other, data in made.image().items() if other != name}
    if name == f"fs-{ROOT}.img":
        assert check(left, ALLOWED)  # then a process shares them
        return
    with pytest.raises(BadImage):
        check(left, ALLOWED)


@pytest.mark.parametrize(
    "changed",
    [
        _open("/scratch/log.txt", f2=1),
        _open("/dev/shm/x", f2=2),
        _open("/dev/null", f2=2),
        _open("/opt/python/lib/x.so"),
        _open(f"/proc/{CHILD}/stat"),
        _open("/scratch/x", f5={1: UID, 2: UID, 3: 0, 4: 0, 5: ROOT}),
        _unix(b"\0hidden"),
        _unix(b"/scratch/x\0", f13={1: 0o140600, 2: UID, 3: UID}),
        _unix(b"x\0", f14="/tmp"),
        _root(f1=6),
        _root(f3=0x0040000),
        _root(f14=500),
        _thread(f3=20),  # nice 10
        _filters({1: FILTER, 3: 1}, {1: b"more", 2: 0, 3: 1}),
        _ghost(),
        _inventory(),
    ],
)
def test_what_a_program_may_have_passes(changed):
    assert check(made.image() | changed, ALLOWED)


def test_image_of_another_user_is_refused():
    with pytest.raises(BadImage, match=f"user or group {UID} instead of 5"):
        check(made.image(), dataclasses.replace(ALLOWED, uid=5))


@given(
    name=st.sampled_from(sorted({*made.image()} - {"pages-1.img"})),
    at=st.integers(0, 10_000),
    with_byte=st.integers(0, 255),
    cut=st.booleans(),
)
def test_no_byte_makes_the_check_fail_in_another_way(name, at, with_byte, cut):
    """A changed or lost byte passes or is refused as a BadImage, and never gives other rights."""
    image = made.image()
    data = bytearray(image[name])
    at %= len(data)
    data[at] = with_byte
    image[name] = bytes(data[:at] if cut else data)
    try:
        tree = check(image, ALLOWED)
    except BadImage:
        return
    assert tree.root > 1000


# --- real images ----------------------------------------------------------------------------------

PROGRAM = """
import os, socket, subprocess, sys, tempfile, threading, time
listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen()
pair = socket.socketpair()
named = socket.socket(socket.AF_UNIX); named.bind("/scratch/sock"); named.listen()
log = open("/scratch/log.txt", "a"); gone = tempfile.TemporaryFile(dir="/scratch")
gone.write(b"x"); gone.flush()
memory = os.memfd_create("own"); event = os.eventfd(1); watch = os.open("/proc/self/stat", 0)
ended = subprocess.Popen(["true"]); child = subprocess.Popen(["sleep", "1000"])
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
os.write(1, b"ready\\n")  # all of it at once: its image is made then
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def dumped(criu, tmp_path_factory):
    if os.geteuid():
        pytest.skip("only root may store processes")
    home = tmp_path_factory.mktemp("dumped")
    ran = two_stubs.run(
        two_stubs.Request(
            criu=str(criu), argv=[sys.executable, "p.py"], files={"p.py": PROGRAM},
            home=str(home), stop_after_s=[0.0], says_first=True, keep=True,
        )
    )  # fmt: skip
    assert ran.output == "ready\n"
    return Path(ran.images[0])


@pytest.fixture
def allowed():
    shown = tuple(map(str, sandbox._shown((), ())))
    return image_check.Allowed(
        uid=261_001,
        machine=os.uname().machine,
        filter_programs=(sandbox.filter_program(has_own_network=True),),
        shown=shown,
    )


def test_image_of_a_real_program_passes_and_can_change_its_user(dumped, allowed):
    files = image_folder.read(dumped)
    tree = check(files, allowed)
    assert len(tree.threads_of) == 3
    assert len(tree.threads) == 4
    other = with_owner(files, 261_001, 262_002)
    assert check(other, dataclasses.replace(allowed, uid=262_002)) == tree
    changed = {name for name in files if files[name] != other[name]}
    assert {"files.img", "memfd.img", "ghost-file-1.img"} <= changed
    assert with_owner(other, 262_002, 261_001) == files


def test_real_image_of_another_filter_or_user_is_refused(dumped, allowed):
    files = image_folder.read(dumped)
    with pytest.raises(BadImage, match="system call filter"):
        check(files, dataclasses.replace(allowed, filter_programs=(b"other",)))
    with pytest.raises(BadImage, match="user or group 261001"):
        check(files, dataclasses.replace(allowed, uid=1))
    with pytest.raises(BadImage, match="another kind of processor"):
        check(files, dataclasses.replace(allowed, machine="riscv64"))


def test_link_in_the_place_of_a_file_is_not_followed(dumped, tmp_path):
    (tmp_path / "core-1001.img").symlink_to(dumped / "core-1001.img")
    with pytest.raises(OSError, match="symbolic links"):
        image_folder.read(tmp_path)


def test_image_in_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "_FILES_MOST", 3)
    for name in ("core-1001.img", "mm-1001.img", "pages-1.img", "criu.log"):
        (tmp_path / name).touch()
    assert len(image_folder.read(tmp_path)) == 3
    (tmp_path / "pages-2.img").touch()
    with pytest.raises(BadImage, match="in too many pieces: 4 files"):
        image_folder.read(tmp_path)

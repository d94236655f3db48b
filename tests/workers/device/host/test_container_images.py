"""Commands in container images on a real device: what they see, and what they cannot do."""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Started
from app.core.model.provisions.mounts import digest
from app.core.model.provisions.registry_image import allowed_registries
from app.core.model.provisions.tunnel import TunnelTicket
from tests.launches import launch_of, spec_of
from tests.registry import Registry
from tests.workers.conftest import DeviceRig, words_in_memory
from tests.workers.image_files import oci_layout, root_file_system, tar_of, tar_of_folder
from workers.device.store_io import NotFetched, held_image
from workers.transfer.installs import image_fetcher
from workers.transfer.installs.container_images import ContainerImages

#: Looks around with the programs of the image alone; each line is an answer.
LOOK = """
cat /etc/os-release
ls /
echo $PATH $SMALL $HOME $TMPDIR $GIVEN
for path in /usr/bin/python3 /work /etc/passwd; do test -e $path && echo there $path; done
touch /bin/mine 2>&1; touch /mine 2>&1
test -u /bin/id && echo setuid
echo kept > kept.txt; echo tmp > /tmp/x; cat kept.txt /tmp/x /dev/null
test -e /proc/self/status && echo proc
exit 0
"""


MARK = f"mark-{secrets.token_hex(12)}"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with container images of this machine's own programs: a folder, and a layout."""
    host = tmp_path_factory.mktemp("images")
    root = root_file_system(host / "small")
    (root / "bin" / "id").chmod(0o4755)
    (root / "opt").mkdir()
    (root / "opt" / "away").symlink_to("/etc")
    oci_layout(
        host / "layout", tar_of_folder(root), tar_of(), variables={"SMALL": "yes", "MARK": MARK}
    )
    (root / "words.txt").write_text("data")
    return host


@pytest.fixture
def showing(rigs: Callable[..., DeviceRig], small: Path) -> DeviceRig:
    """A device that knows container images and may show what lies below their root."""
    rig = rigs(mount_roots=(str(small),))
    if "files" not in rig.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no mount namespaces")
    rig.images = {"small": str(small / "small"), "layout": str(small / "layout")}
    return rig


def launch(rig: DeviceRig, task: str, words: list[str], image: str, **more: Any) -> None:
    """Launch a command in a container image, with the path that the island names."""
    spec = replace(spec_of({"command": words}), image=image, **more.pop("spec", {}))
    rig.launch(task, words, root=rig.images.get(image, ""), spec=spec, **more)


def offered(rig: DeviceRig) -> list[str]:
    return [each for each in rig.reports[-1].facts["offers"] if each.startswith("image:")]


def test_command_sees_its_image_read_only_and_nothing_of_the_host(showing: DeviceRig) -> None:
    rig = showing
    rig.until(lambda: offered(rig) == ["image:layout", "image:small"])
    launch(rig, "t1", ["sh", "-c", LOOK], "layout", spec={"env": {"GIVEN": "mine"}})
    rig.event(Finished, "t1")
    said = rig.printed("t1")
    assert said[0] == "NAME=small"
    assert said[1:5] == ["bin", "code", "dev", "etc"]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert f"{path} yes /scratch /tmp mine" in said, "\n".join(said)
    assert not [line for line in said if line.startswith(("there", "setuid"))]
    refused = [line for line in said if "touch" in line]
    assert len(refused) == 2
    assert all("Read-only file system" in line for line in refused)
    assert said[-3:] == ["kept", "tmp", "proc"]
    facts = rig.until(lambda: rig.reports[-1].facts.get("unpacked"))
    assert facts["layout"]["size_bytes"] > 100_000


@pytest.mark.security
def test_zygote_never_has_the_variables_of_an_image(showing: DeviceRig) -> None:
    rig = showing
    launch(rig, "t1", ["sh", "-c", "echo $MARK"], "layout")
    rig.event(Finished, "t1")
    assert rig.printed("t1") == [MARK]
    zygote = rig.supervisor.spawner.zygote
    assert zygote is not None
    there = "import_what_jobs_need"
    assert words_in_memory(zygote.process.pid, there, MARK) == [there]


def test_second_launch_unpacks_nothing_and_a_changed_image_is_unpacked_anew(
    showing: DeviceRig, small: Path
) -> None:
    rig = showing
    launch(rig, "t1", ["cat", "/words.txt"], "small")
    rig.event(Finished, "t1")
    assert rig.printed("t1") == ["data"]
    [built] = (rig.house.images.folder / "built").iterdir()
    launch(rig, "t2", ["cat", "/words.txt"], "small")
    rig.event(Finished, "t2")
    assert [*built.parent.iterdir()] == [built]
    (small / "small" / "words.txt").write_text("changed")
    launch(rig, "t3", ["cat", "/words.txt"], "small")
    rig.event(Finished, "t3")
    assert rig.printed("t3") == ["changed"]
    assert len([*built.parent.iterdir()]) == 2
    (small / "small" / "words.txt").write_text("data")


def test_command_begins_again_elsewhere_in_its_image_and_folder(
    showing: DeviceRig, rigs: Callable[..., DeviceRig]
) -> None:
    rig = showing
    script = (
        'test -e seen && ends=1; touch seen; echo "$ROUNDHOUSE_RESTARTS"; test $ends || sleep 60'
    )
    launch(rig, "t1", ["sh", "-c", script], "small")
    rig.until(lambda: rig.printed("t1") == ["0"])
    images = rig.paused_and_saved("t1", 1)
    rig.close()
    other = rigs(mount_roots=rig.house.mount_roots)
    other.images = rig.images
    launch(other, "t1", ["sh", "-c", script], "small", epoch=2, images=images)
    assert other.event(Started, "t1", 2).resumed == "folder"
    other.event(Finished, "t1", 2)
    assert other.printed("t1", 2) == ["1"]


def test_mounts_and_image_go_together_where_nothing_is_followed(
    showing: DeviceRig, small: Path
) -> None:
    rig = showing
    (small / "data").mkdir(exist_ok=True)
    (small / "data" / "a.txt").write_text("alpha")
    rig.mounts = {"data": str(small / "data")}

    def read(task: str, target: str) -> None:
        spec, paths = {"mounts": {target: "data"}}, {target: rig.mounts["data"]}
        launch(rig, task, ["cat", f"{target}/a.txt"], "small", spec=spec, mounts=paths)

    read("t1", "/data/deep")
    rig.event(Finished, "t1")
    assert rig.printed("t1") == ["alpha"]
    read("t2", "/opt/away/roundhouse-test")
    failed = rig.event(Failed, "t2")
    assert failed.cause == "mount"
    assert "/opt/away is a symbolic link" in failed.message
    assert not Path("/etc/roundhouse-test").exists()
    read("t3", "/opt/none")
    assert "lacks the folder /opt/none" in rig.event(Failed, "t3").message


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gone", "Its tenant may not use the container image gone any more, or it was removed."),
        ("outside", "This host may not show the container image outside."),
        ("none", "could not be unpacked: it cannot be opened"),
    ],
)
def test_image_that_cannot_be_shown_fails_the_task_with_the_reason(
    showing: DeviceRig, small: Path, name: str, told: str
) -> None:
    rig = showing
    rig.images |= {"outside": "/etc", "none": str(small / "none")}
    launch(rig, "t1", ["true"], name)
    failed = rig.event(Failed, "t1")
    assert failed.cause == "mount"
    assert told in failed.message
    assert str(small) not in failed.message


@pytest.mark.parametrize("fault", ["disk", "memory"])
def test_fault_of_the_host_fails_the_task_once_and_names_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "small").mkdir()
    images = ContainerImages(folder=tmp_path / "kept", limit_bytes=2**30)
    if fault == "disk":
        (tmp_path / "kept").write_text("no folder can be made in a file")
    else:
        monkeypatch.setattr(ContainerImages, "_unpack", lambda *_: bytearray(2**60))
    house: Any = SimpleNamespace(mount_roots=(str(tmp_path),), images=images)
    spec = replace(spec_of({"command": ["true"]}), image="small")
    named = launch_of("t1", spec=spec, root=str(tmp_path / "small"))
    with pytest.raises(NotFetched) as raised:
        held_image(named, house)
    assert raised.value.cause == "mount"
    assert "small could not be unpacked: this host failed" in raised.value.message
    assert str(tmp_path) not in raised.value.message


def test_program_that_the_image_lacks_is_named(showing: DeviceRig) -> None:
    launch(showing, "t1", ["python3", "-V"], "small")
    failed = showing.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert "'python3' was not found" in failed.message


def test_terminal_in_an_image_is_refused_with_the_reason(showing: DeviceRig) -> None:
    rig = showing
    launch(rig, "t1", ["sleep", "60"], "small")
    rig.event(Started, "t1")
    ticket = TunnelTicket(tunnel="tun_1/0", task="t1", epoch=1, kind="shell", expires_s=2**40)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert "container image" in rig.supervisor.tunnel_opener.open(ticket, theirs)
    rig.cancel("t1")


def test_images_without_the_layer_files_are_refused(
    rigs: Callable[..., DeviceRig], small: Path
) -> None:
    rig = rigs(mount_roots=(str(small),), sandbox="off")
    rig.images = {"small": str(small / "small")}
    rig.until(lambda: rig.reports[-1].facts["images"] == digest(rig.images))
    launch(rig, "t1", ["true"], "small")
    assert "without the sandbox layer 'files'" in rig.event(Failed, "t1").message
    assert offered(rig) == []


def test_restarted_device_offers_its_images_from_its_first_report_on(
    showing: DeviceRig, rigs: Callable[..., DeviceRig]
) -> None:
    showing.until(lambda: offered(showing) == ["image:layout", "image:small"])
    showing.close()
    again = rigs(mount_roots=showing.house.mount_roots)
    assert offered(again) == ["image:layout", "image:small"]


# --- images of registries -------------------------------------------------------------------------

needs_skopeo = pytest.mark.skipif(
    shutil.which(image_fetcher.PROGRAM) is None,
    reason="skopeo is missing; on Debian: apt-get install skopeo",
)


@needs_skopeo
def test_command_runs_in_an_image_of_a_registry_that_its_host_allows(
    rigs: Callable[..., DeviceRig], small: Path
) -> None:
    with Registry(small / "layout", "acme/small", "other/small") as registry:
        allowed = allowed_registries(f"http://{registry.host}/acme")
        rig = rigs(image_registries=allowed, skopeo=shutil.which(image_fetcher.PROGRAM))
        if "files" not in rig.reports[-1].facts["sandbox"]:
            pytest.skip("this machine gives no mount namespaces")
        assert f"registry:{registry.host}" in rig.reports[-1].facts["offers"]
        for task in ("t1", "t2"):
            launch(
                rig, task, ["sh", "-c", "cat /etc/os-release; echo $SMALL"], registry.reference()
            )
            rig.event(Finished, task)
            assert rig.printed(task) == ["NAME=small", "yes"]
        assert len([digest for kind, digest in registry.asked if kind == "blobs"]) == 3
        launch(rig, "t3", ["true"], registry.reference("0d" * 32))
        failed = rig.event(Failed, "t3")
        assert failed.cause == "mount"
        assert "could not be fetched: the registry localhost" in failed.message
        assert failed.message.endswith("has no image acme/small with this digest.")
        launch(rig, "t4", ["true"], registry.reference(name="other/small"))
        assert "are not allowed here; allowed are localhost" in rig.event(Failed, "t4").message


def test_host_without_skopeo_offers_no_registry_and_says_what_is_missing(
    rigs: Callable[..., DeviceRig],
) -> None:
    rig = rigs(image_registries=allowed_registries("docker.io"))
    assert not [one for one in rig.reports[-1].facts["offers"] if one.startswith("registry:")]
    launch(rig, "t1", ["true"], f"docker.io/library/debian@sha256:{'0d' * 32}")
    failed = rig.event(Failed, "t1")
    assert failed.cause == "mount"
    assert "this host has no skopeo; it is in the Debian package skopeo" in failed.message

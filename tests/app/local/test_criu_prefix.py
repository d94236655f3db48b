from __future__ import annotations

import hashlib
import re

import pytest

from app.local import criu_prefix
from app.local.criu_prefix import CannotInstall, Package, download, install, main, read_packages

PINNED = criu_prefix.PACKAGES.read_text()


def _names(architecture):
    return {package.name.partition("_")[0] for package in read_packages(PINNED, architecture)}


def test_both_architectures_have_the_same_packages():
    assert _names("amd64") == _names("arm64")
    assert {"criu", "libc6"} <= _names("amd64")
    assert read_packages(PINNED, "riscv64") == []


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_every_package_is_pinned_by_hash_and_names_no_host(architecture):
    for package in read_packages(PINNED, architecture):
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256)
        assert re.fullmatch(r"pool/main/[\w.+~/-]+\.deb", package.path)
        assert package.name.endswith((f"_{architecture}.deb", "_all.deb"))


def test_program_is_at_least_the_oldest_that_device_workers_take():
    (criu,) = (each for each in read_packages(PINNED, "amd64") if each.name.startswith("criu_"))
    assert criu.name.startswith("criu_4.2.1-")


@pytest.fixture
def archive(tmp_path):
    """A mirror with one package."""
    file = tmp_path / "mirror" / "pool" / "one.deb"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a package")
    return f"file://{tmp_path}/mirror"


def test_package_with_the_pinned_hash_is_taken_from_the_first_mirror_that_has_it(tmp_path, archive):
    package = Package(hashlib.sha256(b"a package").hexdigest(), "pool/one.deb")
    found = download(package, [f"file://{tmp_path}/empty", archive], tmp_path)
    assert found.read_bytes() == b"a package"


def test_package_with_another_hash_is_refused(tmp_path, archive):
    with pytest.raises(CannotInstall, match=r"has one\.deb with the pinned hash"):
        download(Package("0" * 64, "pool/one.deb"), [archive], tmp_path)
    assert not (tmp_path / "one.deb").exists()


def test_prefix_that_is_there_stays_if_a_new_one_cannot_be_made(tmp_path, archive):
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    (prefix / "old").touch()
    with pytest.raises(CannotInstall):
        install(prefix, [archive])
    assert (prefix / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror", "prefix"]


def test_command_says_what_is_missing_and_fails(tmp_path, archive, capsys):
    assert main([str(tmp_path / "prefix"), archive]) == 1
    assert "make criu MIRROR=ADDRESS" in capsys.readouterr().err

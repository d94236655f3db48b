"""A lock is one text for one environment, and never has what the platform has imported."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.provisions.package_lock import (
    PackageLock,
    over_platform,
    read_lock,
    stand_ins,
)
from app.core.model.provisions.requirements import BadFile, PinnedPackage
from tests.core.model.provisions.test_requirements import HASH, NAMES, VERSIONS
from tests.thoroughness import examples

INSTALLED = {"numpy": "2.4.6", "torch": "2.13.0"}
PINS = st.builds(
    PinnedPackage,
    name=NAMES.map(str.lower).map(lambda name: name.replace("_", "-").replace(".", "-")),
    version=VERSIONS,
    marker=st.sampled_from(["", "sys_platform == 'linux'"]),
    hashes=st.just((HASH,)),
).filter(lambda pin: "--" not in pin.name)


@given(pins=st.lists(PINS, max_size=6), over=st.booleans())
@settings(max_examples=examples(100))
def test_lock_is_read_as_it_was_written_and_in_any_order(
    pins: list[PinnedPackage], over: bool
) -> None:
    has = INSTALLED if over else {}
    lock = PackageLock(python="3.11", packages=tuple(pins), over=has)
    turned = PackageLock(python="3.11", packages=tuple(reversed(pins)), over=has)
    assert read_lock(lock.text) == read_lock(turned.text)
    assert lock.sha256 == turned.sha256
    assert read_lock(lock.text).alone is not over


def test_other_text_is_no_lock() -> None:
    for text in ("", "tqdm==4", "# Roundhouse lock 1\n# python 3.11\n# beside\n"):
        with pytest.raises(BadFile):
            read_lock(text)


@given(pins=st.lists(PINS, max_size=6), version=VERSIONS)
@settings(max_examples=examples(100))
def test_platform_is_taken_out_and_another_version_of_it_is_named(
    pins: list[PinnedPackage], version: str
) -> None:
    torch = PinnedPackage(name="torch", version=version, hashes=(HASH,))
    rest, unfit = over_platform([torch, *pins], INSTALLED)
    assert not {one.name for one in rest} & INSTALLED.keys()
    fits = version.partition("+")[0] == INSTALLED["torch"]
    assert any(line.startswith("torch") for line in unfit) is not fits


def test_local_part_of_a_version_does_not_matter() -> None:
    rest, unfit = over_platform([PinnedPackage(name="torch", version="2.13.0+cu130")], INSTALLED)
    assert (rest, unfit) == ([], [])
    assert dict(stand_ins(INSTALLED))["torch"] == "2.13.0+platform"

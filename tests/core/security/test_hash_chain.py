"""The chain of records: whatever is done to it afterwards is found, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.security.hash_chain import GENESIS, Break, ChainLink, TrustedLink, link_hash, verify

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def chain(*said):
    links, hash = [], GENESIS
    for id, what in enumerate(said, start=1):
        says = {"id": id, "what": what}
        links.append(ChainLink(id=id, says=says, previous=hash, hash=link_hash(hash, says)))
        hash = links[-1].hash
    return links


FIVE = chain("a", "b", "c", "d", "e")
HEAD = TrustedLink(5, FIVE[4].hash)


@given(st.lists(ANYTHING, max_size=5))
def test_untouched_chain_is_valid_from_any_record_on(said):
    links = chain(*said)
    whole = verify(links, TrustedLink())
    assert (whole.broken, whole.checked) == (None, len(said))
    for link in links:
        rest = verify(links[link.id - 1 :], TrustedLink(link.id, link.hash))
        assert (rest.broken, rest.head) == (None, whole.head)
        assert rest.checked == len(said) - link.id


def rewritten(links, at):
    """All from `at` on written anew, so that it looks whole."""
    said = [link.says["what"] for link in links]
    return chain(*said[: at - 1], "another thing", *said[at:])


def changed(id, **to):
    return [replace(link, **to) if link.id == id else link for link in FIVE]


@pytest.mark.parametrize("id", [1, 3, 5])
def test_changed_record_is_named(id):
    found = verify(changed(id, says={"id": id, "what": "no"}), TrustedLink())
    said = f"the content of record {id} does not match its hash"
    assert found.broken == Break(id, said)
    assert found.checked == id - 1


@pytest.mark.parametrize("id", [1, 3])
def test_record_changed_with_its_hash_is_found_at_the_next_record(id):
    says = {"id": id, "what": "no"}
    previous = FIVE[id - 1].previous
    found = verify(changed(id, says=says, hash=link_hash(previous, says)), TrustedLink())
    assert found.broken.id == id
    assert f"record {id + 1} was chained to a different record {id}" in found.broken.detail


@pytest.mark.parametrize("id", [1, 3])
def test_removed_record_is_named(id):
    found = verify([link for link in FIVE if link.id != id], TrustedLink())
    assert found.broken == Break(id, f"record {id} is missing; record {id + 1} follows")


def test_chain_without_its_beginning_is_found():
    says = {"id": 1, "what": "a"}
    found = verify([ChainLink(id=1, says=says, previous="f" * 64, hash="0")], TrustedLink())
    assert found.broken.id == 1


def test_cut_or_rewritten_end_is_found_only_with_a_known_hash():
    assert verify(FIVE[:4], TrustedLink()).broken is None
    assert "is missing" in verify([], HEAD).broken.detail
    anew = rewritten(FIVE, 2)
    assert verify(anew, TrustedLink()).broken is None
    assert "does not have the known hash" in verify(anew[4:], HEAD).broken.detail


def test_known_record_itself_is_checked_again():
    links = changed(3, says={"id": 3, "what": "no"})
    assert verify(links[2:], TrustedLink(3, FIVE[2].hash)).broken.id == 3

"""Destinations have one spelling, patterns cover what they say, and policies only narrow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.fields import Fault, Fields
from app.core.model.provisions.network_policy import (
    MAX_DESTINATIONS,
    BadDestination,
    Destination,
    NetworkWish,
    destination,
    destinations,
    effective,
    is_allowed,
    listed,
    read_network,
    withdrawn,
)
from tests.thoroughness import examples

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,5}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORTS = st.sampled_from([80, 443, 8443])
PLAIN = st.builds(Destination, NAMES, PORTS)
PATTERNS = st.builds(
    lambda name, port: Destination(f"*.{name}" if name else "*", port), NAMES | st.just(""), PORTS
)
ADDRESSES = st.builds(
    lambda address, port: Destination(str(address), port),
    st.ip_addresses().filter(lambda each: getattr(each, "ipv4_mapped", None) is None),
    PORTS,
)
ANY = PLAIN | PATTERNS | ADDRESSES
POLICIES = st.none() | st.lists(ANY, max_size=4).map(tuple)
PATHS = st.lists(POLICIES, max_size=4)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("HuggingFace.co:443", "huggingface.co:443"),
        ("files.pythonhosted.org.:443", "files.pythonhosted.org:443"),
        ("*.pypi.org:443", "*.pypi.org:443"),
        ("*:80", "*:80"),
        ("192.0.2.7:443", "192.0.2.7:443"),
        ("[2001:DB8:0::7]:443", "[2001:db8::7]:443"),
        ("[::ffff:10.0.0.1]:443", "10.0.0.1:443"),
        ("_dmarc.example.org:1", "_dmarc.example.org:1"),
    ],
)
def test_destination_has_one_spelling(text: str, spelling: str) -> None:
    assert str(destination(text)) == spelling


@pytest.mark.parametrize(
    "text",
    [
        "huggingface.co", "huggingface.co:", "huggingface.co:0", "huggingface.co:65536", ":443",
        "huggingface.co:443/path", "https://huggingface.co:443", "a b.org:443", "a..org:443",
        "-a.org:443", "a-.org:443", "*.:443", "**.org:443", "a.*.org:443", "f*.org:443",
        "2130706433:80", "0x7f.1:80", "127.1:80", "10.0.0.256:80", "010.0.0.1:80", "0x7f000001:80",
        "[::1:443", "::1:443x", "[fe80::1%eth0]:443", "[huggingface.co]:443", "a\n.org:443",
        "user@huggingface.co:443", "é.org:443", f"{'a' * 64}.org:443", f"{'a.' * 127}org:443",
    ],
)  # fmt: skip
def test_text_that_is_no_destination_is_refused(text: str) -> None:
    with pytest.raises(BadDestination):
        destination(text)


def test_pattern_is_refused_where_one_destination_is_meant() -> None:
    for text in ("*.pypi.org:443", "*:443"):
        with pytest.raises(BadDestination):
            destination(text, may_be_pattern=False)


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        (
            "*.pypi.org:443",
            ["files.pypi.org:443", "a.b.pypi.org:443", "*.b.pypi.org:443", "*.pypi.org:443"],
            ["pypi.org:443", "evilpypi.org:443", "files.pypi.org:80", "*.org:443", "*:443"],
        ),
        ("*:443", ["pypi.org:443", "*.org:443"], ["10.0.0.1:443", "[::1]:443", "pypi.org:80"]),
        ("pypi.org:443", ["pypi.org:443"], ["files.pypi.org:443", "*.pypi.org:443"]),
        ("10.0.0.1:443", ["10.0.0.1:443"], ["10.0.0.2:443"]),
    ],
)
def test_pattern_covers_the_names_below_it(
    pattern: str, covered: list[str], not_covered: list[str]
) -> None:
    assert all(destination(pattern).covers(destination(each)) for each in covered)
    assert not any(destination(pattern).covers(destination(each)) for each in not_covered)


@settings(max_examples=examples(300), deadline=None)
@given(ANY)
def test_spelling_reads_as_the_same_destination(wanted: Destination) -> None:
    assert destination(str(wanted)) == wanted
    assert destination(str(wanted).upper()) == wanted


@settings(max_examples=examples(300), deadline=None)
@given(ANY, ANY, ANY)
def test_what_covers_a_pattern_covers_what_the_pattern_covers(
    wide: Destination, middle: Destination, narrow: Destination
) -> None:
    assert wide.covers(wide)
    if wide.covers(middle) and middle.covers(narrow):
        assert wide.covers(narrow)
    if wide.covers(middle) and middle.covers(wide):
        assert wide == middle


@settings(max_examples=examples(300), deadline=None)
@given(ANY, st.lists(ANY, max_size=4))
def test_address_is_allowed_only_by_itself(wanted: Destination, allow: list[Destination]) -> None:
    if wanted.is_address:
        assert is_allowed(allow, wanted) == (wanted in allow)


@settings(max_examples=examples(300), deadline=None)
@given(ANY, PATHS)
def test_tenant_may_reach_what_every_policy_above_it_allows(
    wanted: Destination, policies: list[tuple[Destination, ...] | None]
) -> None:
    given_ = [policy for policy in policies if policy is not None]
    is_in_all = bool(given_) and all(is_allowed(policy, wanted) for policy in given_)
    assert is_allowed(effective(policies), wanted) == is_in_all


def test_lists_are_told_in_words() -> None:
    own = destinations(["huggingface.co:443", "*.hf.co:443", "pypi.org:443"])
    above = destinations(["*.hf.co:443", "huggingface.co:443"])
    allow = effective([own, None, above])
    assert listed(allow) == "huggingface.co:443, *.hf.co:443"
    assert listed(effective([None, None])) == listed(effective([own, ()])) == "nothing"
    assert listed(destinations([f"h{n}.org:443" for n in range(12)])).endswith(" and 2 more")
    wish = NetworkWish(allow=("cdn.hf.co:443", "pypi.org:443"))
    assert withdrawn(wish, allow) == ["pypi.org:443"]


def test_field_reports_each_fault_at_its_place() -> None:
    faults: list[Fault] = []
    body = {"allow": ["HF.co:443", "nowhere", 7, "hf.co:443"], "alow": []}
    wish = read_network(Fields(body, "/tasks/0/network", faults))
    assert wish == NetworkWish(allow=("hf.co:443",))
    assert [(each.pointer, each.code) for each in faults] == [
        ("/tasks/0/network/allow/2", "type"),
        ("/tasks/0/network/allow/1", "invalid"),
        ("/tasks/0/network/alow", "unknown-field"),
    ]


@pytest.mark.parametrize(
    "body", [{}, {"allow": []}, {"allow": [f"h{n}.org:443" for n in range(MAX_DESTINATIONS + 1)]}]
)
def test_field_without_or_with_too_many_destinations_is_refused(body: dict[str, object]) -> None:
    faults: list[Fault] = []
    read_network(Fields(body, "/network", faults))
    assert [each.pointer for each in faults] == ["/network/allow"]

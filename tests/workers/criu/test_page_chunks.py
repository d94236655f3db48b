from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.criu.made_image import pagemap
from workers.criu.image_records import BadRecord
from workers.criu.page_chunks import CHUNK_BYTES, PAGE_BYTES, cuts, pages_of, sizes

WINDOW = CHUNK_BYTES // PAGE_BYTES


@st.composite
def runs(draw):
    """Draw runs of pages in the order of their addresses."""
    at, found = draw(st.integers(0, 2**30)), []
    for _ in range(draw(st.integers(0, 20))):
        at += draw(st.integers(0, 3 * WINDOW))
        count = draw(st.integers(1, 3 * WINDOW))
        found.append((at * PAGE_BYTES, count))
        at += count
    return found


@given(runs())
def test_parts_are_the_whole_file_and_none_crosses_a_window(found):
    size = sum(count for _, count in found) * PAGE_BYTES
    parts = cuts(pagemap(*found), size)
    assert sum(sizes(parts)) == size
    at = 0
    for part in parts:
        assert part.offset == at
        assert 0 < part.size_bytes <= CHUNK_BYTES
        at += part.size_bytes
    windows = [part.address // CHUNK_BYTES for part in parts]
    assert len({*windows}) == len(windows)


@given(runs(), st.integers(0, 19), st.integers(1, 9))
def test_new_pages_change_only_the_chunks_of_their_own_window(found, which, more):
    """Pages that appear behind all others of a window leave the chunks of other windows as is."""
    if not found:
        return
    address, count = found[which % len(found)]
    end = address // PAGE_BYTES + count
    after = [start // PAGE_BYTES for start, _ in found if start > address]
    room = min([*after, (end // WINDOW + 1) * WINDOW]) - end
    if room <= 0:
        return
    grown = [(start, n + min(more, room) * (start == address)) for start, n in found]
    changed = {*_chunks(grown)} ^ {*_chunks(found)}
    assert len({window for window, _ in changed}) <= 1


def _chunks(found):
    """Return (window, hash) of each chunk; a page holds its own address."""
    pages = b"".join(
        hashlib.sha256(str(address // PAGE_BYTES + n).encode()).digest() * (PAGE_BYTES // 32)
        for address, count in found
        for n in range(count)
    )
    for part in cuts(pagemap(*found), len(pages)):
        data = pages[part.offset : part.offset + part.size_bytes]
        yield part.address // CHUNK_BYTES, hashlib.sha256(data).hexdigest()


def test_pages_that_are_not_in_the_file_are_left_out():
    both = pagemap((0, 2), flags=4), pagemap((0, 2), flags=8)
    assert [sizes(cuts(each, size)) for each, size in zip(both, (8192, 0), strict=True)] == [
        [8192],
        [],
    ]


def test_map_names_its_file_of_pages():
    assert pages_of(pagemap((0, 1), pages=7)) == 7


@pytest.mark.parametrize(
    ("data", "size", "told"),
    [
        (pagemap((0, 2)), PAGE_BYTES, "tells of 8192 bytes of pages, and there are 4096"),
        (pagemap((0, 2)), 3 * PAGE_BYTES, "tells of 8192 bytes"),
        (pagemap((1, 1)), PAGE_BYTES, "not in order"),
        (pagemap((8192, 1), (4096, 1)), 8192, "not in order"),
        (pagemap((0, 2), (4096, 1)), 3 * 4096, "not in order"),
        (pagemap((0, 0)), 0, "not in order"),
        (pagemap((0, 2**41)), 0, "not in order"),
        (pagemap((0, 1), flags=1), 4096, "lie in another image"),
        (b"", 0, "does not begin as such a file"),
        (pagemap((0, 1))[:-1], 4096, "truncated"),
    ],
)
def test_map_that_does_not_fit_is_refused(data, size, told):
    with pytest.raises(BadRecord, match=told):
        cuts(data, size)

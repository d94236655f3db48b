"""How an image is cut, and that a manifest is believed only if every byte of it lies somewhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.checkpoints import manifest as manifests
from app.core.model.checkpoints.manifest import (
    GROUP_BYTES,
    LARGEST_CHUNK_BYTES,
    SMALL_BYTES,
    About,
    BadManifest,
    Chunk,
    Manifest,
    Part,
    RankImage,
    Span,
    Tensor,
    planned,
)

MB = 2**20
SIZES = st.lists(
    st.one_of(
        st.integers(0, 100),
        st.integers(SMALL_BYTES - 2, SMALL_BYTES + 2),
        st.integers(0, 20 * MB),
    ),
    min_size=1,
    max_size=40,
)


# --- the plan -----------------------------------------------------------------------------------


@given(SIZES)
def test_every_byte_lies_in_exactly_one_chunk(sizes):
    covered = [0] * len(sizes)
    for cut in planned(sizes):
        for span in cut:
            assert span.offset == covered[span.part]  # in order, so never twice and without a gap
            covered[span.part] += span.size
    assert covered == sizes


@given(SIZES)
def test_chunks_are_neither_empty_nor_too_large(sizes):
    for cut in planned(sizes):
        size = sum(span.size for span in cut)
        assert 0 < size <= LARGEST_CHUNK_BYTES
        assert len(cut) == 1 or size <= GROUP_BYTES


@given(SIZES, st.integers(1, 100))
def test_large_tensors_are_cut_the_same_whatever_is_small_beside_them(sizes, more):
    """A counter that grows, or a small tensor more, moves no boundary of a large one."""
    large = [size for size in sizes[1:] if size >= SMALL_BYTES]
    other = [sizes[0] + more, *large, more]

    def boundaries(all_sizes):
        cuts = [cut for cut in planned(all_sizes) if cut[0].part and len(cut) == 1]
        found = [
            (span.offset, span.size) for (span,) in cuts if all_sizes[span.part] >= SMALL_BYTES
        ]
        return found

    assert boundaries(sizes) == boundaries(other)


def test_thousand_tiny_tensors_make_few_chunks():
    sizes = [5000]
    for _ in range(500):
        sizes += [8 * MB, 4096, 4]
    cuts = planned(sizes)
    shared = [cut for cut in cuts if len(cut) > 1]
    # 63 * 4100 = 258,300 of at most 262,144 bytes, 8 times; two for each large one; the graph.
    assert len(shared) == 8
    assert len(cuts) == 8 + 1000 + 1


def test_short_tail_joins_the_chunk_before_it():
    assert planned([0, 4 * MB + 1]) == [(Span(1, 0, 4 * MB + 1),)]
    assert planned([0, 5 * MB]) == [(Span(1, 0, 4 * MB),), (Span(1, 4 * MB, MB),)]


def test_object_graph_has_chunks_of_its_own():
    assert planned([10, 20, 30]) == [(Span(0, 0, 10),), (Span(1, 0, 20), Span(2, 0, 30))]


# --- to JSON and back ---------------------------------------------------------------------------


def manifest_of(sizes, *, tensors=(), **more):
    chunks = tuple(
        Chunk(address=f"{number:064x}", spans=cut) for number, cut in enumerate(planned(sizes))
    )
    parts = tuple(Part(size=size, device="cuda", pinned=bool(size % 2)) for size in sizes)
    rank = RankImage(parts=parts, chunks=chunks, tensors=tensors)
    more = {"fingerprint": {"torch": "2.13"}, **more}
    about = About(tenant="ten_a", task="tsk_a", epoch=3, step=17, **more)
    return Manifest(about=about, ranks=(rank,))


@given(SIZES)
def test_decoding_gives_what_was_encoded(sizes):
    manifest = manifest_of(sizes)
    body = manifests.encode(manifest)
    assert manifests.decode(body) == manifest
    assert manifests.encode(manifests.decode(body)) == body
    assert manifest.size_bytes == sum(sizes)


def test_manifest_says_where_a_dump_has_damaged_processes_and_is_unchanged_elsewhere():
    manifest = manifest_of([9], dump_damaged=True)
    assert manifests.decode(manifests.encode(manifest)) == manifest
    assert "dump_damaged" not in manifests.as_json(manifest_of([9]))


W = Tensor(name="model.w", storage=0, dtype="bfloat16", shape=(3, 2), stride=(1, 4), offset=1)


def test_manifest_holds_the_table_of_tensors():
    # Elements at 1 + i + 4 j for i < 3, j < 2: the last is 1 + 2 + 4 = 7, so 8 elements of 2 bytes.
    assert (W.elements, W.size, W.end) == (6, 12, 16)
    manifest = manifest_of([9, 16], tensors=(W,))
    assert manifests.decode(manifests.encode(manifest)) == manifest


def row(body):
    return body["ranks"][0]["tensors"]["model.w"]


def broken(change, sizes=(9, 16)):
    body = json.loads(manifests.encode(manifest_of(list(sizes), tensors=(W,))))
    change(body)
    with pytest.raises(BadManifest) as caught:
        manifests.from_json(body)
    return caught.value


def test_truncated_manifest_is_refused():
    body = manifests.encode(manifest_of([9, 16]))
    with pytest.raises(BadManifest):
        manifests.decode(body[:-1])


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda b: b.update(format="roundhouse manifest 2"), "format"),
        (lambda b: b.update(step=-1), "step"),
        (lambda b: b.update(step=True), "step"),
        (lambda b: b.update(tenant=""), "tenant"),
        (lambda b: b.update(size_bytes=24), "size_bytes"),
        (lambda b: b.update(ranks={}), "ranks"),
        (lambda b: b["ranks"][0].update(parts=[]), "ranks[0].parts"),
        (lambda b: b["ranks"][0]["parts"].append([1, "../cpu", False]), "ranks[0].parts[2]"),
        (lambda b: b["ranks"][0]["chunks"].pop(), "ranks[0].chunks"),
        (lambda b: b["ranks"][0]["chunks"][0].__setitem__(0, "../../etc"), "ranks[0].chunks[0]"),
        (lambda b: b["ranks"][0]["chunks"][1][1][0].__setitem__(1, 1), "ranks[0].chunks"),
        (lambda b: b["ranks"][0]["chunks"][1][1][0].__setitem__(0, 7), "ranks[0].chunks"),
        (lambda b: b["ranks"][0]["chunks"][1][1].append([1, 0, 16]), "ranks[0].chunks"),
        (
            lambda b: b["ranks"][0]["chunks"][1][1][0].__setitem__(2, 2**40),
            "ranks[0].chunks[1]",
        ),
        (lambda b: row(b).__setitem__(0, 1), "ranks[0].tensors['model.w']"),
        (lambda b: row(b).__setitem__(1, ["x"]), "ranks[0].tensors['model.w']"),
        (lambda b: row(b).__setitem__(4, 2), "ranks[0].tensors['model.w']"),
        (lambda b: row(b).__setitem__(3, [1]), "ranks[0].tensors['model.w']"),
        (lambda b: row(b).pop(), "ranks[0].tensors['model.w']"),
        (
            lambda b: row(b).__setitem__(slice(2, 4), [[2**62] * 64, [0] * 64]),
            "ranks[0].tensors['model.w']",
        ),
        (lambda b: b["ranks"][0].update(tensors=[]), "ranks[0].tensors"),
    ],
)
def test_fault_of_a_manifest_is_reported_with_its_path(change, path):
    assert broken(change).path == path


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_other_json_is_no_manifest(body):
    with pytest.raises(BadManifest):
        manifests.from_json(body)

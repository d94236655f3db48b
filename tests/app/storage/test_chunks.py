"""Chunks are compressed only if that makes them smaller."""

from __future__ import annotations

import random

import pytest

from app.storage.chunks import PLAIN, SAMPLE_BYTES, ZSTD, packed_up, unpacked

RANDOM = random.Random(1).randbytes(2 * SAMPLE_BYTES)


@pytest.mark.parametrize(
    ("body", "codec"),
    [
        (b"", PLAIN),
        (bytes(1000), ZSTD),
        (RANDOM[:1000], PLAIN),
        (RANDOM, PLAIN),
        (RANDOM[: SAMPLE_BYTES + 100], PLAIN),  # its samples overlap and repeat each other
    ],
    ids=["empty", "zeros", "few random", "random", "overlapping samples"],
)
def test_chunk_is_never_stored_larger_than_it_is(body: bytes, codec: bytes) -> None:
    packed = b"".join(packed_up(body))
    assert packed[-1:] == codec
    assert len(packed) <= len(body) + 1
    assert unpacked(packed, len(body)) == body

"""An encrypted chunk shows nothing of its bytes, and any other bytes in its place are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.storage.backend import Folder
from app.storage.chunk_cipher import ChunkCipher, ciphers
from app.storage.chunks import Chunks, Damaged, packed_up

KEY, OTHER = b"k" * 32, b"o" * 32
PAGE = b"the marker of a page " * 1000
RANDOM = bytes(range(256)) * 4 + os.urandom(8192)


@pytest.fixture
def place(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


def chunks(place: Folder, key: bytes | None = KEY, tenant: str = "ten_a") -> Chunks:
    return Chunks(place, tenant, None if key is None else ChunkCipher(key))


def kept(place: Folder, body: bytes, key: bytes | None = KEY, tenant: str = "ten_a") -> str:
    mine = chunks(place, key, tenant)
    address = mine.address(body)
    with mine.writing() as writing:
        writing.put(address, body)
        writing.settle()
    return address


def stored(place: Folder) -> dict[str, bytes]:
    return {found.name: place.get(found.name) for found in place.listed("chunks")}


@pytest.mark.parametrize("body", [PAGE, RANDOM, b"x"], ids=["shrinks", "does not", "one byte"])
def test_chunk_is_read_back_and_the_store_shows_nothing_of_it(place, body):
    address = kept(place, body)
    assert bytes(chunks(place).get(address, len(body))) == body
    [(name, packed)] = stored(place).items()
    assert name.endswith(address)
    assert body[:16] not in packed or len(body) < 16
    assert address != chunks(place, None).address(body)


def test_equal_chunks_of_a_tenant_are_one_object_and_of_two_tenants_have_nothing_in_common(place):
    first = kept(place, PAGE)
    before = stored(place)
    assert kept(place, PAGE) == first
    for name in before:
        place.delete(name)
    kept(place, PAGE)
    assert stored(place) == before  # not only its name: all of its bytes
    other = kept(place, PAGE, OTHER, "ten_b")
    assert other != first
    bodies = [packed for packed in stored(place).values()]
    assert len({*bodies}) == 2
    assert len({packed[:12] for packed in bodies}) == 2


def test_bytes_of_one_chunk_in_two_encodings_have_two_nonces():
    """Another version of the compressor makes other bytes of the same chunk."""
    cipher = ChunkCipher(KEY)
    address = cipher.address(PAGE)
    small, encoding = packed_up(PAGE)
    one, two = (cipher.encrypted("ten_a", address, body, encoding) for body in (small, PAGE))
    assert one[0] != two[0]


def damaged(place: Folder, address: str, body: bytes, key: bytes | None = KEY) -> str:
    with pytest.raises(Damaged) as caught:
        chunks(place, key).get(address, len(body))
    assert caught.value.what == f"chunk {address[:16]}…"
    return caught.value.found


def test_chunk_that_was_changed_cut_or_swapped_is_refused_by_name(place):
    first, second = kept(place, PAGE), kept(place, RANDOM)
    names = {name.rpartition("/")[2]: name for name in stored(place)}
    whole = {address: place.get(name) for address, name in names.items()}

    def told(packed: bytes) -> str:
        place.keep([packed], lambda: names[first])
        return damaged(place, first, PAGE)

    body = whole[first]
    flipped = bytearray(body)
    flipped[len(body) // 2] ^= 1
    for packed in (bytes(flipped), body[:-3] + body[-1:], whole[second], b"\0" * 28 + body[-1:]):
        assert "it was changed, cut, or is another chunk" in told(packed)
    assert "cannot be encrypted ones" in told(body[-20:])
    other_encoding = bytes([body[-1] ^ 1])
    assert "it was changed" in told(body[:-1] + other_encoding)
    assert told(b"".join(packed_up(PAGE))) == "it is not encrypted, and its image is"
    place.keep([body], lambda: names[first])
    assert bytes(chunks(place).get(first, len(PAGE))) == PAGE
    assert damaged(place, first, PAGE[:-1]).startswith("it")  # its manifest says another size


def test_chunk_of_another_tenant_or_key_does_not_open(place):
    address = kept(place, PAGE)
    [(name, packed)] = stored(place).items()
    place.keep([packed], lambda: name.replace("ten_a", "ten_b"))
    with pytest.raises(Damaged, match="does not open it"):
        chunks(place, KEY, "ten_b").get(address, len(PAGE))
    assert "does not open it" in damaged(place, address, PAGE, OTHER)
    assert damaged(place, address, PAGE, None) == "it is encrypted"


def test_keys_have_names_that_tell_nothing_of_them():
    found = ciphers([KEY.hex(), OTHER.hex()])
    assert [*found] == [ChunkCipher(KEY).id, ChunkCipher(OTHER).id]
    assert all(len(id) == 32 and id not in (KEY.hex(), OTHER.hex()) for id in found)
    for bad, told in (("", "has 32 bytes"), ("ab", "has 32 bytes"), ("zz" * 32, "hexadecimal")):
        with pytest.raises(ValueError, match=told):
            ciphers([bad])

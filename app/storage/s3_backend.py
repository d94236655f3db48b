"""An S3 bucket as a place for the store's bytes, so that hosts need no shared folder.

    ROUNDHOUSE_STORE=s3://bucket/prefix
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL (if not Amazon's)

S3 shows an object whole or not at all, and at once, so nothing needs to be renamed.  Every call
has a deadline; calls that can be retried are, until `patience_s` is over.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from app.storage.backend import INCOMING, Batch, Bytes, Missing, Named

CONNECT_S = 5.0
_PART_BYTES = 32 * 2**20  # part size of a long upload; memory use is a few times as much
_PIECE = 2**20
_CLOCK = f"{INCOMING}/clock"


class BucketAway(OSError):
    """Raised if the bucket did not answer, or refused; this says nothing about its content."""


class Bucket:
    hands = 8
    is_near = False

    def __init__(self, url: str, *, patience_s: float, **config: Any) -> None:
        """`url` is "s3://bucket/prefix"; `config` overrides the environment, e.g. `endpoint`."""
        self.url = url
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        endpoint = config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
        self._store = S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            client_options={
                "timeout": f"{patience_s}s",
                "connect_timeout": f"{min(CONNECT_S, patience_s)}s",
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={
                "max_retries": 5,
                "retry_timeout": datetime.timedelta(seconds=patience_s),
            },
            **config,
        )

    def __str__(self) -> str:
        return self.url

    def size(self, name: str) -> int | None:
        try:
            with self._calling(name):
                return obstore.head(self._store, name)["size"]
        except Missing:
            return None

    def get(self, name: str) -> bytes:
        with self._calling(name):
            return obstore.get(self._store, name).bytes().to_bytes()

    def open(self, name: str) -> IO[bytes]:
        file = tempfile.TemporaryFile(prefix="roundhouse-")  # noqa: SIM115
        try:
            with self._calling(name):
                for piece in obstore.get(self._store, name).stream(min_chunk_size=_PIECE):
                    file.write(piece)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def read(self, name: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        with self._calling(name):
            got = obstore.get(self._store, name, options={"range": (start, end)})
        return self._streamed(name, got)

    def _streamed(self, name: str, got: Any) -> Iterator[memoryview]:
        with self._calling(name):
            for piece in got.stream(min_chunk_size=_PIECE):
                yield memoryview(piece)

    def keep(self, pieces: Iterable[Bytes], named: Callable[[], str]) -> None:
        with tempfile.TemporaryFile(prefix="roundhouse-") as file:
            for piece in pieces:
                file.write(piece)
            file.seek(0)
            name = named()
            with self._calling(name):
                obstore.put(self._store, name, file, chunk_size=_PART_BYTES)

    @contextlib.contextmanager
    def batch(self) -> Iterator[Batch]:
        yield _BucketBatch(self)

    def listed(self, prefix: str) -> Iterator[Named]:
        with self._calling(prefix):
            for page in obstore.list(self._store, prefix=prefix):
                for found in page:
                    yield Named(found["path"], found["size"], found["last_modified"].timestamp())

    def move(self, name: str, to: str) -> None:
        with self._calling(name):
            obstore.copy(self._store, name, to)
        self.delete(name)

    def delete(self, name: str) -> None:
        with contextlib.suppress(Missing), self._calling(name):
            obstore.delete(self._store, name)

    def now_s(self) -> float:
        with self._calling(_CLOCK):
            obstore.put(self._store, _CLOCK, b"-", use_multipart=False)
            return obstore.head(self._store, _CLOCK)["last_modified"].timestamp()

    def tidy(self, *, older_than_s: float) -> int:
        """Delete drafts of images that killed writers left behind.

        Unfinished uploads are not visible; the bucket's lifecycle rule must remove them.
        """
        before_s = self.now_s() - older_than_s
        found = [one for one in self.listed(INCOMING) if one.name != _CLOCK]
        old = [one.name for one in found if one.changed_s < before_s]
        for name in old:
            self.delete(name)
        return len(old)

    def _put(self, name: str, body: bytes) -> None:
        with self._calling(name):
            obstore.put(self._store, name, body, use_multipart=False)

    @contextlib.contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:  # obstore's error for a missing object
            if "NoSuchBucket" in str(error):
                raise BucketAway(f"the store {self.url}: the bucket does not exist") from error
            raise Missing(name) from error
        except (BaseError, OSError) as error:
            told = " ".join(str(error).split())[:300]
            raise BucketAway(f"the store {self.url} failed a call for {name}: {told}") from error


class _BucketBatch:
    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def put(self, name: str, body: Iterable[Bytes]) -> None:
        self.bucket._put(name, b"".join(body))

    def settle(self) -> None:
        """Do nothing: each object was durable when its call returned."""

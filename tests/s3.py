"""A server that speaks S3, as a process of its own (moto), and buckets on it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.storage.s3_backend import Bucket
from tests.ports import free_port


@dataclass
class S3:
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """How a deployment would name it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        name = f"b-{uuid.uuid4().hex[:12]}"
        made = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(made, timeout=60).close()
        return f"s3://{name}/some/prefix"

    def bucket(self, url: str | None = None, *, patience_s: float = 20.0) -> Bucket:
        config = {
            "endpoint": self.endpoint,
            "access_key_id": "someone",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }
        return Bucket(url or self.new_bucket(), patience_s=patience_s, **config)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving() -> Iterator[S3]:
    s3 = S3(port=free_port())
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(s3.port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    s3.process = subprocess.Popen(words, env={**os.environ, "PYTHONWARNINGS": "ignore"}, **quiet)
    try:
        _wait_for(s3)
        yield s3
    finally:
        s3.kill()


def _wait_for(s3: S3) -> None:
    until_s = time.monotonic() + 180
    while time.monotonic() < until_s:
        assert s3.process is not None
        assert s3.process.poll() is None, "the S3 server ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", s3.port), 1).close()
            return
        time.sleep(0.05)  # nothing tells when it listens
    raise AssertionError("the S3 server does not answer")

"""Health check of a worker's container: exits with 0 if the messages of its queues are consumed.

    python -m app.local.health_check [--alive] [QUEUE]

Without a queue it looks at those of the devices that `roundhouse worker` serves on this host.
With --alive, a Redis that does not answer is no fault of the worker. A restart would not help, and
the worker continues by itself once Redis is back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import redis

from app.settings import settings

WAITING_LIMIT = 50  # messages


def main(queues: Sequence[str], *, is_redis_needed: bool = True) -> str:
    """Return what is wrong, or an empty text."""
    url = settings().redis_url.get_secret_value()
    try:
        with redis.Redis.from_url(url, socket_timeout=5, **settings().redis_tls) as client:
            waiting = {queue: client.llen(queue) for queue in queues}
    except (redis.ConnectionError, redis.TimeoutError) as error:
        return f"Redis does not answer: {error}" if is_redis_needed else ""
    late = [f"{n} messages wait in {queue}" for queue, n in waiting.items() if n > WAITING_LIMIT]
    return "; ".join(late)


def queues_of_host() -> list[str]:
    """Return the queues of the devices that this host's worker serves."""
    return [f"device.{device}" for device in json.loads(settings().host_file.read_text())["serves"]]


def _asked(arguments: argparse.Namespace) -> str:
    try:
        queues = [arguments.queue] if arguments.queue else queues_of_host()
    except FileNotFoundError as error:
        return f"no worker of this host has begun: {error}"
    return main(queues, is_redis_needed=not arguments.alive)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m app.local.health_check", description=__doc__)
    parser.add_argument("--alive", action="store_true", help="ask whether a restart would help")
    parser.add_argument("queue", nargs="?")
    sys.exit(_asked(parser.parse_args()) or 0)

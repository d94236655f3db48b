"""Health check of a worker's container: exits with 0 if the messages of a queue are consumed.

    python -m app.local.health_check [--alive] QUEUE

With --alive, a Redis that does not answer is no fault of the worker. A restart would not help, and
the worker continues by itself once Redis is back.
"""

from __future__ import annotations

import argparse
import sys

import redis

from app.settings import settings

WAITING_LIMIT = 50  # messages


def main(queue: str, *, is_redis_needed: bool = True) -> str:
    """Return what is wrong, or an empty text."""
    url = settings().redis_url.get_secret_value()
    try:
        with redis.Redis.from_url(url, socket_timeout=5, **settings().redis_tls) as client:
            waiting = client.llen(queue)
    except (redis.ConnectionError, redis.TimeoutError) as error:
        return f"Redis does not answer: {error}" if is_redis_needed else ""
    return f"{waiting} messages wait" if waiting > WAITING_LIMIT else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m app.local.health_check", description=__doc__)
    parser.add_argument("--alive", action="store_true", help="ask whether a restart would help")
    parser.add_argument("queue")
    asked = parser.parse_args()
    sys.exit(main(asked.queue, is_redis_needed=not asked.alive) or 0)

"""Health check of a worker's container: exits with 0 if the messages of a queue are consumed.

python -m app.local.health_check QUEUE
"""

from __future__ import annotations

import sys

import redis

from app.settings import settings

WAITING_LIMIT = 50  # messages


def main(queue: str) -> str:
    """Return what is wrong, or an empty text."""
    url = settings().redis_url.get_secret_value()
    with redis.Redis.from_url(url, socket_timeout=5, **settings().redis_tls) as client:
        waiting = client.llen(queue)
    return f"{waiting} messages wait" if waiting > WAITING_LIMIT else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)

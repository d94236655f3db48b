"""Celery over Redis, as wake-up transport and process host; no work lives in its messages.

Names of queues and messages, and the settings that every process shares.  A bare client made by
`make_celery` can send to workers that it does not import.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

CONTROL_QUEUE = "control"

CONTROL_NUDGE = "control.nudge"  # something was submitted or asked for
ISLAND_NUDGE = "island.nudge"  # look again
ISLAND_ALIVE = "island.alive"  # one argument: an encoded messages.Alive
DEVICE_NEWS = "device.news"  # its arguments: an encoded messages.Answer, orders, in this order


def island_queue(island: str) -> str:
    return f"island.{island}"


def device_queue(device: str) -> str:
    return f"device.{device}"


def make_celery(name: str, redis_url: str) -> Celery:
    celery = Celery(name, broker=_broker_url(redis_url))
    celery.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_publish_retry=False,  # a hint that cannot be sent is sent again by its owner
        task_default_queue="unused",
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_pool_limit=4,
        broker_transport_options=_transport(redis_url),
    )
    return celery


def send(celery: Celery, name: str, queue: str, *args: Any, expires_s: float = 30.0) -> None:
    """Publish one hint; raises kombu.exceptions.OperationalError if Redis does not take it."""
    # The body is not shown once more in the headers, for nobody reads it there.
    shown = {"argsrepr": "", "kwargsrepr": ""}
    celery.send_task(name, args=args, queue=queue, expires=expires_s, ignore_result=True, **shown)


def _broker_url(redis_url: str) -> str:
    # redis-py says unix://, Kombu says redis+socket://
    return redis_url.replace("unix://", "redis+socket://", 1)


def _transport(redis_url: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "visibility_timeout": 60,
        "health_check_interval": 5,
        "socket_timeout": 10,
        "socket_connect_timeout": 3,
    }
    if not redis_url.startswith("unix://"):
        options["socket_keepalive"] = True
    return options

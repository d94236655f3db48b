"""Applies the field `retry` of a task after a failed attempt: it decides, and what grows grows.

`core.model.retry_decision` has the rules.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model import descriptor as descriptors
from app.core.model import failure_causes, retry_decision
from app.core.model.descriptor import MAX_DURATION_S, TaskDescriptor
from app.core.model.device_choice import TRAITS, choice_in, traits_in, with_reservation
from app.core.model.protocol.messages import Failed
from app.core.model.provisions.retry import ELSEWHERE, FAIL, RetryRule
from app.core.model.retry_decision import HELD_BY_RULE, AttemptFailure, RetryDecision
from app.core.units import duration, size
from app.db import transactions
from app.db.models import Device, Placement, Task
from app.scheduling import guest_placements

JSON = dict[str, Any]


def decide(
    session: Session, task: Task, placement: Placement, event: Failed, *, is_excused: bool
) -> RetryDecision:
    """Decide what follows the failure. What the next attempt asks for, and which devices it avoids,
    is then in the task's row.
    """
    policy = replace(task.spec.retry, max=task.retry_max)
    failure = AttemptFailure(
        cause=event.cause,
        exit_status=event.exit_status,
        lines=event.matched,
        attempts=task.attempts,
        is_excused=is_excused,
    )
    decision = retry_decision.decide(policy, failure)
    if not decision.gives_up and decision.rule is not None and decision.rule.grow:
        decision = _grow(session, task, decision, decision.rule)
    if not decision.gives_up:
        _avoid(session, task, placement, event.cause, decision)
    return decision


def apply(session: Session, task: Task, event: Failed, decision: RetryDecision) -> None:
    """Write down when the task that goes back to the queue starts again."""
    task.attempts = decision.attempts
    if decision.is_held:
        task.hold = HELD_BY_RULE
    else:
        now = transactions.now(session)
        task.retry_at = now + timedelta(seconds=decision.wait_s)
    if event.cause == "max_duration":  # its time counts from here on
        task.unheard_us = task.total_held_us


def told_of(event: Failed, decision: RetryDecision) -> JSON:
    """Return what an event says of the failure, besides its sentence."""
    said = {
        "exit_status": event.exit_status,
        "rule": decision.number or None,
        "line": decision.line or None,
    }
    known = {name: value for name, value in said.items() if value is not None}
    return {"cause": event.cause, "attempt": decision.attempts, **known}


def _avoid(
    session: Session, task: Task, placement: Placement, cause: str, decision: RetryDecision
) -> None:
    is_strict = decision.do == ELSEWHERE
    if not is_strict and cause not in failure_causes.AVOIDED_AFTER:
        return
    guests = guest_placements.of_last_epoch(session, [task.id] if task.devices_max > 1 else [])
    avoided = retry_decision.with_avoided(
        retry_decision.avoided_in(task.avoids),
        [placement.device_id, *guests.get(task.id, ())],
        is_strict=is_strict,
        now_s=transactions.now_s(session),
    )
    task.avoids = [list(astuple(each)) for each in avoided]


# --- what grows -----------------------------------------------------------------------------------


def _grow(session: Session, task: Task, decision: RetryDecision, rule: RetryRule) -> RetryDecision:
    """Let the task ask for more in its next attempt; if nothing can grow, there is none."""
    before = spec = task.spec
    told = list[str]()
    for name, factor in rule.grow.items():
        now = descriptors.amounts_of(spec)[name]
        new = min(now * factor, _most(session, task, spec, name))
        if new > now:
            spec = descriptors.with_amount(spec, name, new)
            told.append(f"{name} grows from {_amount(name, now)} to {_amount(name, new)}")
        else:
            told.append(f"{name} cannot grow beyond {_amount(name, now)}")
    sentence = "; ".join(told)
    if spec is before:
        told_it = f"It is not retried: {sentence}."
        return replace(decision, do=FAIL, told=told_it, attempts=task.attempts)
    task.descriptor = descriptors.as_json(spec)
    task.memory_bytes = spec.devices.memory_bytes
    reservation = choice_in(task.device_choice).reservation
    task.device_choice = with_reservation(descriptors.choice_text(spec), reservation)
    return replace(decision, told=f"{decision.told} Then {sentence}.")


def _most(session: Session, task: Task, spec: TaskDescriptor, name: str) -> float:
    """Return the most that a device of the task's island can give the task of this amount."""
    if name == "max_duration_s":
        return MAX_DURATION_S
    columns = (Device.memory_bytes, *(Device.facts[trait] for trait in TRAITS))
    query = select(*columns).where(Device.island == task.island, Device.kind == task.kind)
    choice = spec.devices.choice.lasting
    resource = name.removeprefix("resources.").removesuffix("_bytes")
    others = tuple(each for each in choice.resources if each[0] != resource)
    choice = replace(choice, resources=others) if name.startswith("resources.") else choice
    amounts = [0.0]
    for memory_bytes, *facts in session.execute(query.distinct()):
        traits = traits_in(dict(zip(TRAITS, facts, strict=True)))
        if name == "devices.memory_bytes":
            amounts.append(memory_bytes if choice.suits(traits) else 0)
        elif memory_bytes >= spec.devices.memory_bytes and choice.suits(traits):
            amounts.append(dict(traits.gives).get(resource, 0))
    return max(amounts)


def _amount(name: str, value: float) -> str:
    return size(int(value)) if name.endswith("_bytes") else duration(value)

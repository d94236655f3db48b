"""Makes the members of a lot from its description, and decides when they are made.

In `params`, `env`, the words of a command and the names of published datablocks, `${array.index}`
stands for a member's index, and `${matrix.KEY}` or `${search.KEY}` for its value of a key. A
parameter that is nothing else has the value itself, with its type. A key that is named nowhere
becomes a parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.core.model.descriptor import Descriptor, TaskDescriptor, faults_of_task
from app.core.model.fields import NAME, NAME_RULE, Fault, escaped
from app.core.model.lifecycle import State
from app.core.model.provisions.lot_values import Scalar
from app.core.model.provisions.lots import INDEX_VARIABLE, MOST_MEMBERS
from app.core.model.provisions.stop_rule import MOST_STOPPED

_PLACE = re.compile(r"\$\{(array|matrix|search)\.([A-Za-z_]\w*)\}", re.ASCII)
_INDEX = ("array", "index")
_MOST_NAME = 63 - len(f".{MOST_MEMBERS - 1}")  # characters of a lot's name


def member_name(lot: str, index: int) -> str:
    return f"{lot}.{index}"


def member(task: TaskDescriptor, index: int, values: Mapping[str, Scalar]) -> TaskDescriptor:
    """Return the member of the lot with this index and these values."""
    group = task.drawn_from.GROUP if task.drawn_from is not None else ""
    known: dict[tuple[str, str], Any] = {(group, key): value for key, value in values.items()}
    known[_INDEX] = index
    unnamed = {key: values[key] for key in values if (group, key) not in _named(task)}
    env = {name: _text(value, known) for name, value in task.env.items()}
    if task.run.kind != "function":  # a function shares its process, and so its variables
        env[INDEX_VARIABLE] = str(index)
    return replace(
        task,
        name=member_name(task.name, index),
        array=None,
        matrix=None,
        search=None,
        run=replace(task.run, argv=tuple(_text(word, known) for word in task.run.argv)),
        params={**unnamed, **_filled(dict(task.params), known)},
        env=env,
        publish={port: _text(name, known) for port, name in task.publish.items()},
    )


def _filled(value: Any, known: Mapping[tuple[str, str], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, known) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, known) for inner in value]
    if not isinstance(value, str):
        return value
    alone = _PLACE.fullmatch(value)
    return known[alone[1], alone[2]] if alone else _text(value, known)


def _text(text: str, known: Mapping[tuple[str, str], Any]) -> str:
    return _PLACE.sub(lambda found: _shown(known[found[1], found[2]]), text)


def _shown(value: Scalar) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _named(task: TaskDescriptor) -> set[tuple[str, str]]:
    return {name for _, text in _texts(task) for name in _PLACE.findall(text)}


def _texts(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    """Yield (pointer below the task, text) for all that may name values."""
    for n, word in enumerate(task.run.argv):
        yield f"run/command/{n}", word
    for group, values in (("env", task.env), ("publish", task.publish)):
        for name, value in values.items():
            yield f"{group}/{escaped(name)}", value
    stack: list[tuple[str, Any]] = [("params", dict(task.params))]
    while stack:
        where, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{where}/{escaped(key)}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(f"{where}/{n}", inner) for n, inner in enumerate(value)]
        elif isinstance(value, str):
            yield where, value


# --- checks ---------------------------------------------------------------------------------------


def faults(descriptor: Descriptor) -> list[Fault]:
    """Return what is wrong with the lots of a request, and with their members."""
    found = [
        Fault(f"/tasks/{n}/{where}", told, "lot")
        for n, task in enumerate(descriptor.tasks)
        for where, told in (
            _outside_of_lots(task)
            if task.array is None
            else (*_misplaced(task), *_unknown_values(task))
        )
    ]
    if found:
        return found
    lots = {task.name: task for task in descriptor.tasks if task.array is not None}
    for n, task in enumerate(descriptor.tasks):
        where = f"/tasks/{n}"
        lot, _, index = task.name.rpartition(".")
        if lot in lots and index.isdecimal():
            told = f"{task.name!r} is the name of a member of the lot {lot!r}"
            found.append(Fault(f"{where}/name", told, "twice"))
        if task.name in lots:
            found += [Fault(f"{where}/{at}", told) for at, told in _misnamed(task)]
            longest = longest_member(task)
            own = {name: value for name, value in longest.env.items() if name != INDEX_VARIABLE}
            found += faults_of_task(replace(longest, env=own, publish={}), where)
    return found


def sampled(descriptor: Descriptor) -> Descriptor:
    """Return the request with a member in place of each lot."""
    lots = (
        task if task.array is None else replace(longest_member(task), name=task.name)
        for task in descriptor.tasks
    )
    return replace(descriptor, tasks=tuple(lots))


def _outside_of_lots(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    if task.stop is not None:
        yield "stop", "compares the members of a lot; add array, matrix or search, or leave it out"


def _misplaced(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    """Yield (pointer below the task, fault) of what cannot be in a lot."""
    if len(task.name) > _MOST_NAME:
        told = f"the name of a lot must have at most {_MOST_NAME} characters; got {len(task.name)}"
        yield "name", f"{told}. Its members append their indices"
    if task.session is not None:
        yield "session", "a lot has no session; submit sessions one by one"
    if task.islands > 1:
        yield "islands", "a member of a lot uses one island; set 1"
    if task.stop is not None and task.array is not None and task.array.count > MOST_STOPPED:
        told = f"must have at most {MOST_STOPPED} members; got {task.array.count}"
        yield "stop", f"a lot whose members are compared {told}"
    if task.search is not None and task.search.learns and not _has_objective(task):
        told = "tpe learns from a metric: name it with stop, or with checkpoint, such as"
        yield "search/method", f"{told} {{best: {{metric: loss}}}}; or draw at random"
    drawn = task.drawn_from
    if drawn is not None and task.from_checkpoint is not None and task.run.kind == "job":
        told = f"the checkpoint's job has parameters of its own, which no {drawn.GROUP} can change"
        yield drawn.GROUP, f"{told}; use an array, or leave out from_checkpoint"


def _has_objective(task: TaskDescriptor) -> bool:
    return task.stop is not None or task.checkpoint.best is not None


def _unknown_values(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    known = {_INDEX, *_examples(task)}
    listed = ", ".join(f"${{{group}.{key}}}" for group, key in sorted(known))
    for where, text in _texts(task):
        if unknown := [name for name in _PLACE.findall(text) if name not in known]:
            yield where, f"unknown value ${{{'.'.join(unknown[0])}}}; known: {listed}"


def longest_member(task: TaskDescriptor) -> TaskDescriptor:
    """Return a member as long as any: with the longest value of each key, and the last index.

    The limits of a task that hold for this member hold for all.
    """
    assert task.array is not None
    longest = {
        key: max(each, key=lambda one: len(_shown(one)))
        for (_, key), each in _examples(task).items()
    }
    return member(task, task.array.count - 1, longest)


def _examples(task: TaskDescriptor) -> Mapping[tuple[str, str], Sequence[Scalar]]:
    """Return values of each key that members have, the longest among them."""
    drawn = task.drawn_from
    if drawn is None:
        return {}
    return {(drawn.GROUP, key): each for key, each in drawn.examples.items()}


def _misnamed(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    """Yield (pointer below the task, fault) of names of datablocks that no member could publish,
    and of those that all members would.
    """
    keys = _examples(task)
    for port, name in task.publish.items():
        where = f"publish/{escaped(port)}"
        named = _PLACE.findall(name)
        if not named:
            told = f"each member would publish a version of {name!r}; name it by ${{array.index}}"
            yield where, told
        usual: dict[tuple[str, str], Any] = {key: each[0] for key, each in keys.items()}
        usual[_INDEX] = 0
        for key in named:
            for value in keys.get(key, (0,)):
                if not NAME.fullmatch(made := _text(name, {**usual, key: value})):
                    yield where, f"{made!r:.80} is not a valid name of a datablock: {NAME_RULE}"
                    return


# --- when -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LotCounts:
    """Counts the members of a lot.

    `made` of them were made so far, with the indices below; `again` of these have ended and start
    again as soon as they may. `failures_allowed` is None if failures never hold the lot. Of those
    that are `live`, `resting` lost at a rung and hold no device; `promoted` of these may go on
    (`core.model.rungs`). Of those that were cancelled, `stopped` were resting when the lot ended.
    """

    count: int
    at_once: int
    failures_allowed: int | None = None
    made: int = 0
    again: int = 0
    live: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    resting: int = 0
    promoted: int = 0
    stopped: int = 0

    @property
    def left(self) -> int:
        """The number of members that are still to be made, or made again."""
        return self.count - self.made + self.again

    @property
    def has_failed_too_often(self) -> bool:
        return self.failures_allowed is not None and self.failed > self.failures_allowed

    @property
    def room(self) -> int:
        """The number of members that may be made, or go on past a rung, now."""
        if self.has_failed_too_often:
            return 0
        return max(0, min(self.at_once - (self.live - self.resting), self.left + self.promoted))

    @property
    def has_only_losers_left(self) -> bool:
        """True if all members have ended, or lost at a rung."""
        return not self.left and not self.promoted and self.live == self.resting > 0

    @property
    def end(self) -> State | None:
        """The state in which the lot ends; None before all its members have ended."""
        if self.left or self.live:
            return None
        if self.failed and (self.failures_allowed is None or self.has_failed_too_often):
            return State.failed
        return State.cancelled if self.cancelled > self.stopped else State.done

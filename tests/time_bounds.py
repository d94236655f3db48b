"""Lists the tests with processes that hold a bound in seconds: `python -m tests.time_bounds`.

On a busy machine such a test fails though nothing is wrong. The list is read from the source: a
test is on it if the test, or a function of its file that it calls, asserts how long something took,
or how late it is. The tightest bounds come first.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
#: Folders whose tests start processes.
FOLDERS = (
    "acceptance", "app/cli", "app/local", "examples", "pages", "security", "sim", "workers",
)  # fmt: skip
_CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns"}


@dataclass(frozen=True, slots=True, order=True)
class TimeBound:
    """A test, and the line at which a time is asserted; infinity if no number is given there."""

    bound_s: float
    test: str
    line: int

    def __str__(self) -> str:
        bound = "?" if self.bound_s == math.inf else f"{self.bound_s:g}"
        return f"{bound:>6} s  {self.test} (line {self.line})"


def bounds_in(source: str, file: str) -> Iterator[TimeBound]:
    """Yield the tightest bound of each test in the source of a file that has one."""
    tree = ast.parse(source)
    values = dict(_numbers(tree.body))
    functions = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    held = {
        name: list(_held(function, values | dict(_defaults(function.args))))
        for name, function in functions.items()
    }
    for name, function in functions.items():
        if not name.startswith("test_"):
            continue
        called = {
            node.func.id
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        found = [bound for one in sorted({name, *called}) for bound in held.get(one, [])]
        if found:
            bound_s, line = min(found)
            yield TimeBound(bound_s, f"{file}::{name}", line)


def _held(function: ast.AST, values: dict[str, float]) -> Iterator[tuple[float, int]]:
    """Yield the bounds that a function asserts, with their lines."""
    times = dict(_times(function, values))
    for node in ast.walk(function):
        if not isinstance(node, ast.Assert):
            continue
        for compared in ast.walk(node.test):
            if isinstance(compared, ast.Compare) and any(
                _reads_clock(side, times) for side in (compared.left, *compared.comparators)
            ):
                yield _bound_s(compared, times, values), node.lineno


def _times(function: ast.AST, values: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the names that a function gives to times, with the seconds that it adds to them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.NamedExpr) and _reads_clock(node.value, {}):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            added = _bound_s(node.value, {}, values)
            yield from ((one.id, added) for one in targets if isinstance(one, ast.Name))


def _reads_clock(expression: ast.AST, times: dict[str, float]) -> bool:
    return any(
        (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
         and node.func.attr in _CLOCKS)
        or (isinstance(node, ast.Name) and node.id in times)
        for node in ast.walk(expression)
    )  # fmt: skip


def _bound_s(expression: ast.AST, times: dict[str, float], values: dict[str, float]) -> float:
    """Return the largest number of seconds in an expression; infinity if it has none."""
    found = [number for node in ast.walk(expression) for number in _number(node, values)]
    found += [
        times[node.id]
        for node in ast.walk(expression)
        if isinstance(node, ast.Name) and node.id in times and times[node.id] < math.inf
    ]
    return max(found, default=math.inf)


def _numbers(body: list[ast.stmt]) -> Iterator[tuple[str, float]]:
    """Yield the constants of a module."""
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield from ((node.targets[0].id, number) for number in _number(node.value, {}))


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, float]]:
    """Yield the arguments of a function that have a number by default."""
    named = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(named[len(named) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if default is not None:
            yield from ((argument.arg, number) for number in _number(default, {}))


def _number(node: ast.AST, values: dict[str, float]) -> list[float]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return [float(node.value)]
    return [values[node.id]] if isinstance(node, ast.Name) and node.id in values else []


def main() -> int:
    found = sorted(
        bound
        for folder in FOLDERS
        for path in (TESTS / folder).rglob("test_*.py")
        for bound in bounds_in(path.read_text(), str(path.relative_to(TESTS.parent)))
    )
    for bound in found:
        print(bound)  # noqa: T201
    print(f"{len(found)} tests with processes hold a bound in seconds.")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

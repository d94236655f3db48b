"""Change one place of the code at a time, and count the changes that no test notices.

    python -m benchmarks.mutants [--quick] [--mutants 300] [--seed 1] [--only app/core/device ...]

Places are drawn by the seed from the code that decides. Each change is tried in a copy of the tree
by the tests of its room and those that import its module, the nearest first, until one fails. A
test may take TEST_CPU_S of processor time, so a busy machine kills no mutant. Tests that noticed a
change run once more without any change: one that fails then proves nothing. Prints the share that
was noticed, and each change that was not: kill it with a test, or say why it changes nothing.

Left out: annotations, assertions, log lines, and strings with blanks, as these are for people.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from resource import RLIMIT_AS, setrlimit
from typing import Any, NamedTuple

from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from benchmarks import Target, quick, report

CORE = ("fairness", "scheduling", "device", "model")
ROOMS = (*(f"app/core/{room}" for room in CORE), "app/intake", "app/scheduling/journal")
MUTANTS, MUTANTS_QUICK, GOAL = 300, 20, 85  # the goal in percent
TEST_CPU_S = 120.0
STUCK_S, MEMORY_BYTES = 3600.0, 8 * 2**30  # for tests that wait without computing, or only grow
PAIRS: list[tuple[type[ast.AST], type[Any]]] = [
    *[(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)],
    *[(ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.BitOr, ast.BitAnd)],
    *[(ast.Mult, ast.Add), (ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult), (ast.Mod, ast.Mult)],
]
OTHER: dict[type[ast.AST], type[Any]] = {two: one for one, two in PAIRS[:8]} | dict(PAIRS)
NOT_CODE = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
NOT_FIELDS = ("annotation", "returns", "decorator_list")
REMOVED = (ast.Delete, ast.Raise, ast.Continue, ast.Break, ast.AugAssign)


class Mutant(NamedTuple):
    path: Path
    line: int
    start: int  # in bytes of the file
    end: int
    after: str


def mutants_of(path: Path) -> list[Mutant]:
    source, starts, found = path.read_bytes(), [0], []
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        for place, after in _changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            found.append(Mutant(path, place.lineno, start, end, after))
    return found


def _code(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_log = isinstance(child, ast.Expr) and ast.unparse(child).startswith("log.")
            is_code = isinstance(child, ast.AST) and not isinstance(child, NOT_CODE)
            if is_code and not is_log and name not in NOT_FIELDS:
                yield from _code(child)


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yield what can be replaced at this node, each with its replacement."""
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for test in filter(None, tests):
        yield test, f"(not ({ast.unparse(test)}))"
    if isinstance(node, ast.Compare):
        for number in range(len(node.ops)):
            changed = copy.deepcopy(node)
            changed.ops[number] = OTHER[type(node.ops[number])]()
            yield node, f"({ast.unparse(changed)})"
    elif type(getattr(node, "op", None)) in OTHER:
        other = copy.deepcopy(node)
        other.op = OTHER[type(node.op)]()
        text = ast.unparse(other)
        yield node, text if isinstance(node, ast.AugAssign) else f"({text})"
    elif value := _other_value(node):
        yield node, value
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_set = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    if is_call or is_set or isinstance(node, REMOVED):
        yield node, "pass"


def _other_value(node: Any) -> str:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        return "return None"
    match node.value if isinstance(node, ast.Constant) else None:
        case bool() as truth:
            return str(not truth)
        case int() | float() as number:
            return repr(number * 2 or 1)
        case str() as word if word and not re.search(r"\s", word):
            return repr(word + "_")
    return ""


def tests_of(path: Path) -> list[str]:
    """Return the files with tests that may run this code, the nearest first."""
    within = path.relative_to("app").with_suffix("").parts
    room = Path("tests", *within[:2]) if within[0] == "core" else Path("tests/app", within[0])
    rooms = [room, Path("tests/app/api/routes")] if within[0] == "intake" else [room]
    package, name = ".".join(("app", *within[:-1])), within[-1]
    imports = rf"\b{package}\.{name}\b|from {package} import (\([^)]*\b{name}\b|[^\n(]*\b{name}\b)"
    order = []
    for test in Path("tests").rglob("test_*.py"):
        is_near, uses = any(map(test.is_relative_to, rooms)), re.search(imports, test.read_text())
        if is_near or (uses and test.is_relative_to("tests/app")):
            far = (test.name != f"test_{name}.py", not (is_near and uses), not is_near)
            order.append((far, str(test)))
    return [test for _, test in sorted(order)]


def pytest_runtest_setup() -> None:
    """Bound the time and memory of each test; this file is a plugin of the tests' process."""
    signal.setitimer(signal.ITIMER_PROF, TEST_CPU_S)
    setrlimit(RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def run_tests(tree: Path, *tests: str) -> list[str]:
    """Run tests there; return those that failed, or why the process ended early."""
    command = [sys.executable, "-m", "pytest", "-q", "--fast", "--tb=no", "-rfE", "-x"]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.mutants"]
    command += ["-m", "not slow and not gpu and not long", *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=STUCK_S)
    except subprocess.TimeoutExpired:
        return [f"no end within {STUCK_S} s"]
    failed = re.findall(r"^(?:FAILED|ERROR) ([^\s[]+)", done.stdout, re.M)
    if done.returncode in (1, 4, 5) and not failed:
        raise RuntimeError(f"pytest cannot run: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return failed or ([f"exit status {done.returncode}"] if done.returncode else [])


def _try_all(tree: Path, drawn: list[Mutant]) -> tuple[list[str], list[str]]:
    """Return the changes that live, and the tests that noticed the others."""
    alive, noticed = [], dict[str, None]()
    for number, mutant in enumerate(drawn, start=1):
        before = mutant.path.read_bytes()
        changed = before[: mutant.start] + mutant.after.encode() + before[mutant.end :]
        (tree / mutant.path).write_bytes(changed)
        failed = run_tests(tree, *tests_of(mutant.path))
        (tree / mutant.path).write_bytes(before)
        noticed |= dict.fromkeys(test for test in failed if "::" in test)
        was = " ".join(before[mutant.start : mutant.end].decode().split())
        where = f"{mutant.path}:{mutant.line}: {was}  =>  {mutant.after}"
        alive += [] if failed else [where]
        print(f"{number} {(failed or ['LIVES'])[0]} {where}", flush=True)
    return alive, [*noticed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mutants", type=int, default=MUTANTS_QUICK if quick() else MUTANTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=ROOMS, help="folders or files")
    args = parser.parse_args()
    paths = {path for room in map(Path, args.only) for path in [room, *room.rglob("*.py")]}
    all_of_them = [m for path in sorted(paths) if path.is_file() for m in mutants_of(path)]
    drawn = random.Random(args.seed).sample(all_of_them, args.mutants)
    with tempfile.TemporaryDirectory() as folder, temporary_home() as home:
        tree, listed = Path(folder), ["git", "ls-files", "-co", "--exclude-standard"]
        for name in filter(os.path.isfile, subprocess.check_output(listed, text=True).splitlines()):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, tree / name)
        with embedded_postgres(home) as database, embedded_redis(home) as redis:
            os.environ |= {"DATABASE_URL": database, "REDIS_URL": redis}
            alive, noticed = _try_all(tree, drawn)
            broken = run_tests(tree, *noticed) if noticed else []
    share = round(100 * (1 - len(alive) / len(drawn)), 1)
    killed = Target(name="changes noticed", value=share, unit="%", op=">=", bound=GOAL)
    anyway = Target(name="fail anyway", value=len(broken), unit="tests", op="<=", bound=0)
    found = {"of": len(all_of_them), "tried": len(drawn), "alive": alive, "fail anyway": broken}
    return report("mutants", [killed, anyway], found)


if __name__ == "__main__":
    sys.exit(main())

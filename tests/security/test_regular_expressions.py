"""Every regular expression of the product answers a long hostile text in little time.

The expressions are found in the source, so a new one is tried too.  The texts are made from the
expression itself: what one part of it matches, very often, and then something that does not match.
"""

from __future__ import annotations

import ast
import importlib
import re
import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import signal
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.security

TIMES = (40, 30_000)  # how often a part is repeated: exponential and quadratic work are seen
CPU_S = 0.3  # for one text; linear work takes milliseconds
ENDS = ("\n\0", "!\n")
SOUGHT = 'a0.-_/ :;,\\"[='  # characters with which parts are filled, where they match
_CALLS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
_MAY_HAVE_ONE = re.compile(r"\bre\.|pattern")  # each process that collects tests reads all files
_SEARCHING = r"\.(?:search|sub|subn|split|findall|finditer)\("
#: made of texts of ours while the service runs
MADE = {("app/api/problems.py", r"re.sub('\\{\\w+\\}', '[^/]+', path)")}


@dataclass(frozen=True)
class Expression:
    """`name` is the variable that holds it, "" if it is used where it stands."""

    file: str
    source: str
    name: str
    searches: bool

    def compiled(self) -> re.Pattern[Any]:
        module = importlib.import_module(self.file.removesuffix(".py").replace("/", "."))
        found = eval(self.source, vars(module))
        return re.compile(found, re.ASCII | re.DOTALL)

    def ways(self) -> list[Callable[[Any], Any]]:
        pattern = self.compiled()
        return [pattern.fullmatch, pattern.match, *([pattern.search] if self.searches else [])]


# --- finding them ---------------------------------------------------------------------------------


@cache
def product() -> dict[str, str]:
    """Return the text of each source file of the product."""
    paths = [path for folder in ("app", "workers") for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


def expressions() -> Iterator[Expression]:
    for file, text in product().items():
        if not _MAY_HAVE_ONE.search(text):
            continue
        tree = ast.parse(text)
        nodes = [*ast.walk(tree)]
        names = {id(node.value): node.targets[0] for node in nodes if isinstance(node, ast.Assign)}
        for node in nodes:
            for found, searches in _of_node(node):
                name = ast.unparse(names[id(node)]) if id(node) in names else ""
                searched = name and any(re.search(name + _SEARCHING, t) for t in product().values())
                yield Expression(file, ast.unparse(found), name, bool(searches or searched))


def _of_node(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield (expression, is it searched for) of a call of `re`, or of a field with a pattern."""
    if isinstance(node, ast.Call):
        yield from ((word.value, True) for word in node.keywords if word.arg == "pattern")
        function = node.func
        if isinstance(function, ast.Attribute) and _is_of_re(function):
            searches = function.attr not in ("compile", "match", "fullmatch")
            yield node.args[0], searches
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "pattern":
                yield value, True


def _is_of_re(function: ast.Attribute) -> bool:
    return function.attr in _CALLS and ast.unparse(function.value) == "re"


FOUND = [one for one in expressions() if (one.file, one.source) not in MADE]


# --- hostile texts --------------------------------------------------------------------------------


def texts(pattern: re.Pattern[Any]) -> Iterator[Any]:
    is_bytes = isinstance(pattern.pattern, bytes)
    source = pattern.pattern.decode() if is_bytes else pattern.pattern
    for before, part in dict.fromkeys(_repeated(parser.parse(source), "")):
        for times in TIMES:
            for end in ENDS:
                text = before + part * times + end
                yield text.encode() if is_bytes else text


def _repeated(items: Any, before: str) -> Iterator[tuple[str, str]]:
    """Yield (what comes before, text that is repeated) of all repeated parts."""
    for op, given in items:
        for inner in _inner(op, given):
            yield from _repeated(inner, before)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT) and given[1] > 1:
            yield from ((before, _text(given[2], sought)) for sought in SOUGHT)
        before += _text([(op, given)], "a")


def _inner(op: Any, given: Any) -> list[Any]:
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        return [given[2]]
    if op is ops.SUBPATTERN:
        return [given[3]]
    if op is ops.BRANCH:
        return list(given[1])
    return [given[1]] if op in (ops.ASSERT, ops.ASSERT_NOT) else []


def _text(items: Any, sought: str) -> str:
    """Return a text that the items match, with the sought character wherever it fits."""
    return "".join(_text_of(op, given, sought) for op, given in items)


def _text_of(op: Any, given: Any, sought: str) -> str:
    if op is ops.LITERAL:
        return chr(given)
    if op in (ops.IN, ops.NOT_LITERAL, ops.ANY):
        fits = (c for c in (sought, *string.printable) if _fits(op, given, c))
        return next(fits)
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        return _text(given[2], sought) * max(given[0], min(given[1], 1))
    inner = _inner(op, given) if op not in (ops.ASSERT, ops.ASSERT_NOT) else []
    return _text(inner[0], sought) if inner else ""


def _fits(op: Any, given: Any, character: str) -> bool:
    items = given if op is ops.IN else [(op, given)]
    negated = items[0][0] is ops.NEGATE
    found = any(_is_one(kind, value, ord(character)) for kind, value in items)
    return found != negated


def _is_one(kind: Any, value: Any, code: int) -> bool:
    character = chr(code)
    classes = {
        ops.CATEGORY_DIGIT: character.isdigit(),
        ops.CATEGORY_SPACE: character.isspace(),
        ops.CATEGORY_NOT_SPACE: not character.isspace(),
        ops.CATEGORY_WORD: character.isalnum() or character == "_",
    }
    match kind:
        case ops.LITERAL:
            return bool(code == value)
        case ops.NOT_LITERAL:
            return bool(code != value)
        case ops.RANGE:
            return bool(value[0] <= code <= value[1])
        case ops.CATEGORY:
            return classes[value]
    return kind is ops.ANY


# --- the tests ------------------------------------------------------------------------------------


class TooLong(Exception):
    pass


def _too_long(*_: Any) -> None:
    raise TooLong


def slow_text(ways: list[Callable[[Any], Any]], pattern: re.Pattern[Any]) -> str:
    """Return the first text for which one of the ways takes too long, or ""."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    try:
        for text in texts(pattern):
            for way in ways:
                try:
                    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
                    way(text)
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                except TooLong:
                    return f"{text[:20]!r} … {text[-20:]!r} ({len(text)})"
        return ""
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.file}: {one.source}")
def test_hostile_text_takes_little_time(one):
    assert slow_text(one.ways(), one.compiled()) == ""


@pytest.mark.parametrize("source", ["(a+)+b", r"x[^\s/]+\S*", r"(a|a)*$", r"^(\w+\.?)*:"])
def test_expression_that_backtracks_is_found(source):
    pattern = re.compile(source)
    assert slow_text([pattern.fullmatch], pattern)


def test_all_are_found():
    assert len(FOUND) > 50
    assert any(one.searches for one in FOUND)

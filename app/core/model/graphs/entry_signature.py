"""Finds out from source code, without running it, how a class or function of a bundle can be
called.

Only certain knowledge counts: a class without a visible `__init__`, or with `**kwargs`, counts as
accepting anything. `app.intake.intake` rejects parameters that would fail at the start.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.core.model.fields import near_name

LISTED = 10  # at most so many unknown parameters are reported one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Lists the keywords that come after `ctx`: `takes` has all, `needs` those without a default.

    `place` is the file and line, for a message.
    """

    takes: tuple[str, ...]
    needs: tuple[str, ...]
    place: str


def of_function(node: ast.FunctionDef, file: str, *, first: int) -> Signature | None:
    """Return the signature of a function; None if it may accept anything.

    `first` is the number of arguments before the keywords.
    """
    args = node.args
    known = args.kwarg is None and args.vararg is None and not node.decorator_list
    if not known or len(args.posonlyargs) > first:
        return None
    plain = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    without = len(plain) - len(args.defaults)
    keywords = [arg.arg for arg in args.kwonlyargs]
    return Signature(
        takes=(*plain[first:], *keywords),
        needs=(
            *plain[first:without],
            *(
                word
                for word, default in zip(keywords, args.kw_defaults, strict=True)
                if default is None
            ),
        ),
        place=f"{file}, line {node.lineno}",
    )


def of_class(node: ast.ClassDef, file: str) -> Signature | None:
    """Return the signature of the class's own `__init__`.

    Returns None if the class has none, or if a call may not reach it.
    """
    own = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    if node.decorator_list or node.keywords or "__init__" not in own or "__new__" in own:
        return None
    return of_function(own["__init__"], file, first=2)


def faults(
    entry: str, signature: Signature, given: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield (parameter or "", what is wrong) for a call with the given parameters."""
    takes = ", ".join(signature.takes) or "no parameters"
    unknown = sorted(given.keys() - set(signature.takes))
    for word in unknown[:LISTED]:
        close = near_name(word, signature.takes)
        hint = f"; did you mean {close!r}?" if close else ""
        yield (
            word,
            (
                f"{entry} has no parameter {word!r}; its parameters are {takes} "
                f"({signature.place}){hint}"
            ),
        )
    if len(unknown) > LISTED:
        more = len(unknown) - LISTED
        yield "", f"{entry} has {more} more unknown parameters"
    for word in signature.needs:
        if word not in given:
            yield "", f"{entry} needs the parameter {word!r} ({signature.place})"

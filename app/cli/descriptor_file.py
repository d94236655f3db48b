"""Reads a descriptor from a YAML or JSON file, and a parameter from `name=value`.

In YAML, only the plain values of JSON are recognised, as in YAML 1.2: numbers, true, false and
null. Nothing is guessed: a repeated key is an error with its position.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from app.cli.bundling import UnreadablePath

#: File names of a folder's descriptor; the first that exists is read.
DESCRIPTOR_NAMES = ("roundhouse.yaml", "roundhouse.yml", "roundhouse.json")


def read_descriptor(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file, or in a folder's descriptor; raises Unreadable."""
    if path.is_dir():
        path = _descriptor_in(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadablePath(f"{path}: cannot be read: {error}") from error
    try:
        found = _parsed(text, str(path))
        json.dumps(found)  # tags and anchors can express more than JSON
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UnreadablePath(f"{path}: not valid YAML or JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnreadablePath(
            f"{path}: a descriptor must be a mapping; got a {type(found).__name__}"
        )
    return found


def _parsed(text: str, name: str) -> Any:
    """Parse the text; errors call it `name`."""
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_param(text: str) -> tuple[str, Any]:
    """Parse `lr=1e-3` as ("lr", 0.001); a value that is not JSON is a string.  Raises
    ValueError.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"must be name=value; got {text!r}")
    try:
        return name, json.loads(value, parse_constant=_no_json)
    except ValueError:
        return name, value


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")


def _descriptor_in(folder: Path) -> Path:
    for name in DESCRIPTOR_NAMES:
        if (folder / name).exists():
            return folder / name
    raise UnreadablePath(
        f"{folder}: no {DESCRIPTOR_NAMES[0]}. Write one, or name what to run:\n  roundhouse submit "
        f"{folder} --job module:Class\n  roundhouse submit {folder} -- python script.py"
    )


class _Loader(yaml.SafeLoader):
    """Loads YAML with the plain values of YAML 1.2, which are JSON's: `8e9` is a number, `on` and
    dates are strings.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong(key, "must be a name")
            if key.value in seen:
                raise _wrong(key, f"duplicate key {key.value!r}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _wrong(node: yaml.Node, what: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _int(_: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _float(_: _Loader, node: yaml.ScalarNode) -> float:
    if math.isinf(number := float(node.value)):
        raise _wrong(node, f"the number {node.value} is too large")
    return number


_WORDS = {
    "null": (r"(?:~|null|)$", ["~", "n", ""]),
    "bool": (r"(?:true|false)$", ["t", "f"]),
    "int": (r"[-+]?[0-9]+$", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
}
for _name, (_pattern, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)

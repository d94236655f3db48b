"""Runs first in every Python that a rank of a command starts: Python imports a module of this name.

A script that never imports torch.distributed notices nothing. When a script imports it, this module
replaces `init_process_group` by a function that first makes the process a rank of its gang. Only a
call of this function loads more code of Roundhouse (`workers.commands.gang.rank_process`).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_SITE = Path(__file__).parent


class _Watcher:
    """A finder that finds no module, but sees each import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                module.init_process_group = _joining(module.init_process_group)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _joining(stock: Any) -> Any:
    @functools.wraps(stock)
    def init_process_group(*arguments: Any, **named: Any) -> None:
        _command_rank().init_process_group(stock, arguments, named)

    return init_process_group


@functools.cache
def _command_rank() -> ModuleType:
    """Import our `workers`; the script may have another module of this name."""
    theirs = _put_aside()
    sys.path.insert(0, str(_SITE.parents[2]))
    try:
        return importlib.import_module("workers.commands.gang.rank_process")
    finally:
        del sys.path[0]
        _put_aside()
        sys.modules.update(theirs)


def _put_aside() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "workers"]
    return {name: sys.modules.pop(name) for name in names}


def _run_who_stands_behind() -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    path = [entry for entry in sys.path if Path(entry) != _SITE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Watcher())
_run_who_stands_behind()

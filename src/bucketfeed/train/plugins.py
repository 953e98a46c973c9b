"""The user's own functions, named as text: `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from bucketfeed.errors import ConfigError


def resolve(name: str, option: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names, looked for in the working directory too.

    Raises `ConfigError`, naming `option`, where there is none.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"{option} must be written package.module:function, not {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{option}: {e}; looked in {os.getcwd()} and the installed packages") from e
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{option}: {module_name} has no {path!r}; it has {', '.join(_public(found)) or 'nothing'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{option}: {name} is {type(found).__name__}, not a function or class")
    return found  # type: ignore[no-any-return]


def call_with_known(function: Callable[..., Any], **makers: Callable[[], Any]) -> Any:
    """Call `function` with those arguments that it has parameters for (all, with `**`); only these are made."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    return function(**{name: make() for name, make in makers.items() if takes_all or name in names})


def _public(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]

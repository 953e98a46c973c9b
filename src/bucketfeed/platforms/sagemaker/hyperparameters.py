"""Options of train.py as a SageMaker job's hyperparameters, and back: same names, values and types.

A hyperparameter is text. Here it is JSON text in ASCII. The SDK's start script decodes it once and writes the result
between single quotes into a shell file, where a quote of its own ends the job in its first second. So a value with a
quote travels as `{"json": "..."}`, whose text has the quote as an escape that is still one after that decoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bucketfeed.errors import ConfigError

LONGEST = 2500  # characters of one value, which SageMaker takes
_WRAPPED = "json"
# Written by the SDK's tuner and by SageMaker's tuning for their own use.
_FOREIGN = ("sagemaker_", "_tuning_")


def encode(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the hyperparameters of a job for `options`: names without dashes (`batch-size`) and any JSON values.

    Raises `ConfigError` for a value that would not arrive as it is: no JSON value, NUL, half a character, too long.
    """
    return {name: _text(name, value) for name, value in options.items()}


def decode(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that `encode` was given. Text that is no JSON, such as a console's, is a string."""
    return {name: _value(text) for name, text in texts.items() if not name.startswith(_FOREIGN)}


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the command line for `options`: true is the option alone, false and None are none at all.

    Lists and objects are given as JSON.

    >>> arguments({"data": "s3://b/k", "lr": 0.1, "audit": True, "model": None})
    ['--data=s3://b/k', '--lr=0.1', '--audit']
    """
    found = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        if value is True:
            found.append(f"--{name}")
        else:
            found.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return found


def _text(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"--{name} is {value!r}, which can't be sent to a job as JSON: {e}") from e
    if json.loads(text) != value:
        raise ConfigError(f"--{name} is {value!r}, which JSON would change; use text as keys, and lists for tuples")
    try:
        plain = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"--{name} is {value!r}, which is no text in UTF-8: {e}; correct it") from e
    if b"\\u0000" in plain.replace(b"\\\\", b""):
        raise ConfigError(f"--{name} is {value!r}: the character NUL can't be given to a program; remove it")
    if "'" in text or (isinstance(value, dict) and value.keys() == {_WRAPPED}):
        text = json.dumps({_WRAPPED: text.replace("'", "\\u0027")})
    if len(text) > LONGEST:
        raise ConfigError(
            f"--{name} takes {len(text)} characters as a hyperparameter, and SageMaker allows {LONGEST}; "
            "put what is long into a file in --source"
        )
    return text


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and value.keys() == {_WRAPPED} and isinstance(value[_WRAPPED], str):
        return json.loads(value[_WRAPPED])
    return value

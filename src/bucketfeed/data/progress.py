"""How far something long has come, for people or for whoever wants to know."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from tqdm.auto import tqdm

Progress: TypeAlias = "bool | Callable[[int, int | None], None]"


@contextlib.contextmanager
def shown(what: str, done: int, total: int | None, progress: Progress) -> Iterator[Callable[[int], None]]:
    """Give a function that is told, from any thread, how many more bytes are done.

    With `progress` true there is a bar on stderr after a second; a function is called with the bytes that are done, and
    of all (None where nobody knows).
    """
    lock = threading.Lock()
    bar = tqdm(desc=what, initial=done, total=total, unit="B", unit_scale=True, delay=1, disable=progress is not True)

    def advance(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            if callable(progress):
                progress(done, total)
            else:
                bar.update(more)

    with bar:
        yield advance

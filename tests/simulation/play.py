"""Plays worlds by their seeds."""

from __future__ import annotations

import gc
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from mok_service import runs
from mok_service.db import ids
from mok_service.db.session import upgrade
from mok_service.runs import leases
from mok_workers import scheduler
from tests.simulation.properties import Violated, fenced, roomy
from tests.simulation.world import HARDWARE, World

UNDER_A_LEASE = ("renew", "mark_starting", "mark_running", "append", "finish", "release")


@cache
def database_file() -> Path:
    """A migrated database of this process, in memory where the system has a folder there."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(prefix="mok-simulation-", dir=memory if memory.is_dir() else None)
    _kept.append(folder)
    path = Path(folder.name) / "mok.db"
    upgrade(f"sqlite:///{path}")
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []


def play(seed: int, trace: list[str] | None = None) -> World:
    """One world to its end. Raises Violated. The same seed gives the same world, to the last id and token."""
    with repeatable(seed):
        world = World(seed, database_file(), trace)
        for name in UNDER_A_LEASE:
            stack_patch(name, partial(fenced, world))
        stack_patch("claim", partial(roomy, world))
        world.play()
        return world


_REAL: dict[str, Callable[..., Any]] = {name: getattr(runs, name) for name in (*UNDER_A_LEASE, "claim")}


def stack_patch(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(runs, name, wrap(_REAL[name]))


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Ids, tokens and the hardware are the seed's; afterwards all is as it was."""
    choose = random.Random(~seed)
    count = iter(range(1, 1 << 40))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            patch.object(ids, "secrets", SimpleNamespace(randbits=choose.getrandbits)),
            patch.object(ids, "time", SimpleNamespace(time_ns=lambda: next(count) * 1_000_000)),
            patch.object(leases, "secrets", SimpleNamespace(token_hex=lambda n: f"{choose.getrandbits(8 * n):0{2 * n}x}")),
            patch.object(scheduler, "hardware", lambda: HARDWARE),
        ):
            yield
    finally:
        logging.disable(level)
        for name, real in _REAL.items():
            setattr(runs, name, real)


def failures(seeds: range) -> list[tuple[int, str]]:
    """The seeds of these whose worlds go wrong, and how."""
    found = []
    gc.freeze()  # what was imported needs no second look after each world
    for seed in seeds:
        try:
            play(seed)
        except Violated as error:
            found.append((seed, str(error)))
        except Exception as error:
            found.append((seed, f"{type(error).__name__}: {error}"))
    return found

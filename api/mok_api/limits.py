"""Token buckets: how much a key or an address may ask for. They live in this process: every API process has its own."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

BUCKETS_MAX: Final = 10_000  # those used last; one that is forgotten is full again


class Buckets:
    """A bucket for each name, which holds up to `burst` tokens and gains `rate` a second. For one thread."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when

    def take(self, name: str) -> float:
        """Takes a token: 0. Where there is none, nothing is taken: the seconds until there is one."""
        tokens = self._tokens(name)
        if tokens < 1.0:
            self._keep(name, tokens)
            return (1.0 - tokens) / self._rate
        self._keep(name, tokens - 1.0)
        return 0.0

    def give_back(self, name: str) -> None:
        """Undoes a `take`."""
        self._keep(name, min(self._burst, self._tokens(name) + 1.0))

    def _tokens(self, name: str) -> float:
        tokens, at = self._buckets.get(name, (self._burst, 0.0))
        return min(self._burst, tokens + (self._clock() - at) * self._rate)

    def _keep(self, name: str, tokens: float) -> None:
        self._buckets[name] = (tokens, self._clock())
        self._buckets.move_to_end(name)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)

"""The wave rule of dense gradients (docs/arithmetic.md, 15.3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mok_service.kernels.native import NativeBackend


class Waves:
    """Groups of one wave are joined by a tree, waves are added in order: neither devices nor micro-batches show in the bits."""

    def __init__(self, backend: NativeBackend, shards: int) -> None:
        self._backend, self._shards = backend, shards
        self._partial: dict[str, list[Tensor | None]] = {}

    def add(self, key: str, gradient: Tensor, group: int, fill: Callable[[Tensor], object]) -> None:
        """`fill(out)` adds one group's sum to `out`; groups of a key come in ascending order."""
        if self._shards == 1:
            fill(gradient)
            return
        shard, levels = group % self._shards, self._partial.setdefault(key, [])
        total = torch.zeros_like(gradient)
        fill(total)
        level = 0
        while (shard >> level) & 1:
            total = self._join(levels, level, total)
            level += 1
        if shard == self._shards - 1:
            for above in range(level, len(levels)):
                if levels[above] is not None:
                    total = self._join(levels, above, total)
            self._backend.add(gradient, total, gradient)
        else:
            levels.extend([None] * (level + 1 - len(levels)))
            levels[level] = total

    def _join(self, levels: list[Tensor | None], level: int, right: Tensor) -> Tensor:
        left = levels[level]
        assert left is not None
        levels[level] = None
        return self._backend.add(left, right, left)

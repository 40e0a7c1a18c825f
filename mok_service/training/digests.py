"""The digests of a trainer's state, step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from mok_service.kernels.native import NativeBackend, host_blake3
from mok_service.provenance.chain import StateDigests, float_bits, float_from_bits
from mok_service.provenance.digest import StateForm
from mok_service.training.checkpoint import DTYPES, cursor_digest
from mok_service.training.parameters import Parameters

PREVIOUS_NORM: Final = "previous_norm"
BESIDE_BYTES_MIN: Final = 8 << 20  # a smaller state is digested sooner than a thread wakes


class StateHashing:
    """Digests weights and moments where they lie. `beside`: it is worth computing on while it does."""

    def __init__(self, parameters: Parameters, backend: NativeBackend) -> None:
        weights, first, second = (
            [(prefix + name, tensor) for name, tensor in parameters.named(flat)]
            for flat, prefix in ((parameters.weights, ""), (parameters.first, "first/"), (parameters.second, "second/"))
        )
        named = weights + first + second
        what = [(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in named]
        norm = norm_tensor(float_bits(0.0))
        self._count = len(weights)
        self._weights = StateForm(what[: self._count])
        self._optimizer = StateForm([*what[self._count :], (PREVIOUS_NORM, DTYPES[norm.dtype], tuple(norm.shape))])
        self._begin = backend.prepare_blake3([tensor for _, tensor in named])
        self.beside = backend.name == "cpu" and sum(tensor.nbytes for _, tensor in named) >= BESIDE_BYTES_MIN

    def begin(self, step: int, previous_norm: str) -> Callable[[], StateDigests]:
        """Begins the digests of the present state, that after `step`, and returns what waits for them. Weights and moments must
        stay as they are until then. `previous_norm`: the norm that clipping keeps, as eight hex digits of its binary32.
        """
        finish = self._begin()

        def digests() -> StateDigests:
            hashes = finish()
            moments = [*hashes[self._count :], host_blake3(norm_tensor(previous_norm))]
            return StateDigests(
                self._weights.digest(hashes[: self._count]), self._optimizer.digest(moments), cursor_digest(step)
            )

        return digests


def norm_tensor(bits: str) -> torch.Tensor:
    """The norm that clipping keeps, as the tensor of the optimizer's state that it is: float32 []."""
    return torch.tensor(float_from_bits(bits), dtype=torch.float32)

"""What every operation of a step wrote: a backend around another that digests, or holds, each native operation's tensors.

A trace costs a BLAKE3 of every output. It is for looking into one step; nothing else goes through here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok_service.kernels.abi import OUTPUTS, UPDATED
from mok_service.kernels.context import BeginBlake3
from mok_service.kernels.native import NativeBackend
from mok_service.training.model import Model
from mok_service.training.parameters import LogicalTensor

# Tensors of which an operation uses the first rows only, by operation. What lies behind them is what some other use left there.
_FIRST_ROWS = {
    "mok_grouped_product_by_rows": ("a_rows", "c"),
    "mok_grouped_product_by_depth": ("a_rows", "b_rows"),
    "mok_swiglu_forward": ("gate_up", "out"),
    "mok_swiglu_backward": ("gate_up", "grad_act", "row_slot", "grad_gate_up", "weighted_act"),
}
# Tensors of which an operation uses the first rows, unless another field says which: by operation, (tensor, field).
_GATHERED = {
    "mok_grouped_product_by_rows": (("a", "a_rows"),),
    "mok_grouped_product_by_depth": (("a", "a_rows"), ("b", "b_rows")),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One native operation of a traced step."""

    number: int            # from 0, in the order of execution
    name: str              # of mok.h
    place: str             # in the model, in words
    outputs: tuple[str, ...]
    digests: tuple[str, ...]  # BLAKE3 of each output


@dataclass
class Trace:
    """The operations of a step, and after each the digest of all outputs so far: equal prefixes have equal digests."""

    operations: list[Operation] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)

    @property
    def digests(self) -> int:
        """How many outputs were digested."""
        return sum(len(operation.digests) for operation in self.operations)

    def add(self, operation: Operation) -> None:
        before = self.prefixes[-1] if self.prefixes else ""
        what = "\n".join((before, operation.name, operation.place, *operation.outputs, *operation.digests))
        self.operations.append(operation)
        self.prefixes.append(hashlib.sha256(what.encode()).hexdigest())


@dataclass
class Held:
    """The tensors of one operation in host memory: what it read, from before it, and what it wrote."""

    number: int
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # what a tensor is called in the model, where that is known
    parts: dict[str, list[LogicalTensor]] = field(default_factory=dict)  # logical tensors in it, offsets from its start


class TracingBackend(NativeBackend):
    """The operations of `inner`, each of them recorded while a trace is being made; operation by operation on a GPU as well."""

    def __init__(self, inner: NativeBackend) -> None:
        self.name, self.device, self.stream = inner.name, inner.device, None
        self.place, self.rows_are_counted = "", True
        self._inner = inner
        self._trace: Trace | None = None
        self._held: Held | None = None
        self._number = 0
        self._model: Model | None = None

    def active(self) -> contextlib.AbstractContextManager[object]:
        return self._inner.active()

    def info(self) -> dict[str, Any]:
        return self._inner.info()

    def prepare_blake3(self, tensors: Sequence[Tensor]) -> BeginBlake3:
        return self._inner.prepare_blake3(tensors)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Inside it, the outputs of every operation are digested."""
        self._trace, self._number = Trace(), 0
        try:
            yield self._trace
        finally:
            self._trace = None

    @contextlib.contextmanager
    def holding(self, number: int, model: Model | None) -> Iterator[Held]:
        """Inside it, the tensors of one operation are copied, and called by the names that the model has for them."""
        self._held, self._number, self._model = Held(number), 0, model
        try:
            yield self._held
        finally:
            self._held = self._model = None

    def call(self, operation: str, **fields: Any) -> Any:
        if operation not in OUTPUTS or (self._trace is None and self._held is None):
            return self._inner.call(operation, **fields)
        number, self._number = self._number, self._number + 1
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        written = [name for name in OUTPUTS[operation] if name in tensors]
        held = self._held if self._held is not None and self._held.number == number else None
        if held is not None:
            read = [name for name in tensors if name not in written or name in UPDATED.get(operation, ())]
            held.inputs = {name: _copy(_used(operation, name, fields)) for name in read}
        result = self._inner.call(operation, **fields)
        if held is not None:
            held.outputs = {name: _copy(_used(operation, name, fields)) for name in written}
            if self._model is not None:
                for name, tensor in tensors.items():
                    held.names[name], held.parts[name] = _known(self._model, tensor)
        if self._trace is not None:
            digests = self._inner.blake3([_used(operation, name, fields).contiguous() for name in written])
            self._trace.add(Operation(number, operation, self.place, tuple(written), tuple(digests)))
        return result


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _used(operation: str, name: str, fields: Mapping[str, Any]) -> Tensor:
    """What an operation reads or writes of a tensor. Other rows of a workspace hold what an earlier use left in them."""
    tensor: Tensor = fields[name]
    gathered = dict(_GATHERED.get(operation, ()))
    if name in _FIRST_ROWS.get(operation, ()) or (name in gathered and fields[gathered[name]] is None):
        rows = fields["rows"] if "rows" in fields else int(fields["row_offsets"][-1])
        return tensor[:rows]
    if name in gathered:
        return _only(tensor, fields[gathered[name]][: int(fields["row_offsets"][-1])])
    if operation == "mok_combine" and name == "rows":
        return _only(tensor, fields["slot_row"])
    return tensor


def _only(tensor: Tensor, rows: Tensor) -> Tensor:
    """A copy with zeros in all but these rows (negative ones are none)."""
    kept = torch.zeros_like(tensor)
    index = rows.reshape(-1).to(torch.int64)
    index = index[index >= 0]
    kept[index] = tensor[index]
    return kept


def _known(model: Model, tensor: Tensor) -> tuple[str, list[LogicalTensor]]:
    """What the model calls a tensor, and the logical tensors in it when it's a piece of the weights, gradients or moments."""
    parameters = model.parameters
    flats = {"gradient": parameters.gradients, "weight": parameters.weights, "first moment": parameters.first,
             "second moment": parameters.second, "operand": parameters.operands}  # fmt: skip
    for kind, flat in flats.items():
        begin = (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()
        if 0 <= begin < flat.numel() and tensor.dtype == flat.dtype:
            inside = [t for t in parameters.layout.tensors if begin <= t.offset and t.offset + t.count <= begin + tensor.numel()]
            parts = [LogicalTensor(t.name, t.shape, t.offset - begin) for t in inside]
            if len(parts) == 1 and parts[0].count == tensor.numel():
                return f"{kind} of {parts[0].name}", parts
            return f"{kind}s", parts
    for name, buffer in model.workspace():
        begin = tensor.data_ptr() - buffer.data_ptr()
        if 0 <= begin < buffer.numel() * buffer.element_size():
            return name, []
    return "", []

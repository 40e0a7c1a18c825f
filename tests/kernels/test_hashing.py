"""BLAKE3 beside the thread that asks: whatever the helpers do or fail to do, the digests are those of the bytes at the time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from blake3 import blake3

from mok_service.kernels import hashing, load_backend
from mok_service.kernels.hashing import Hashing, Helpers, host_bytes, in_parts


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = (1, 0, 1023, 1 << 18, 1 << 19, 77)
    return [torch.randn(size, generator=generator) for size in sizes] + [torch.arange(9, dtype=torch.int64)]


def expected(of: list[torch.Tensor]) -> list[str]:
    return [blake3(tensor.numpy().tobytes()).hexdigest() for tensor in of]


@pytest.mark.parametrize("threads", [1, 3])
def test_each_call_is_of_what_the_tensors_hold_then(threads: int) -> None:
    begin = load_backend("cpu", threads=threads).prepare_blake3(held := tensors())
    for _ in range(20):
        finish, wanted = begin(), expected(held)
        assert finish() == wanted
        for tensor in held:
            tensor.view(torch.uint8).bitwise_xor_(0x5A)


def test_what_a_helper_has_begun_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a tensor before an update and tells its digest after it: that one isn't taken."""
    held, begun, go_on = tensors(), threading.Event(), threading.Event()
    real, mine = hashing._hash, threading.get_ident()

    def slow(part: Sequence[memoryview]) -> list[Any]:
        if threading.get_ident() != mine:
            begun.set()
            go_on.wait()
        return real(part)

    monkeypatch.setattr(hashing, "_hash", slow)
    helpers = Helpers(1)
    running = helpers.begin([[host_bytes(tensor)] for tensor in held])
    assert begun.wait(30)
    wanted = expected(held)
    got = running.result()
    held[0].add_(1.0)
    go_on.set()
    helpers._pool.shutdown()
    late = running._hashed[0]
    assert got == wanted and late is not None and late[0].hexdigest() != got[0], "the helper found something else, too late"


def test_threads_share_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    held = tensors()
    running = Hashing([[host_bytes(tensor)] for tensor in held])
    hashed, real = list[int](), hashing._hash
    monkeypatch.setattr(hashing, "_hash", lambda part: (hashed.extend(map(len, part)), real(part))[1])
    threads = [threading.Thread(target=running.work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running.result() == expected(held) and sorted(hashed) == sorted(tensor.nbytes for tensor in held), "each of them once"


def test_parts_are_worth_waking_for_and_in_order() -> None:
    data = [memoryview(bytes(size)) for size in (0, 1 << 20, 1 << 20, 5, 3 << 20, 7, 8)]
    parts = in_parts(data)
    assert [one.nbytes for part in parts for one in part] == [one.nbytes for one in data]
    assert [sum(one.nbytes for one in part) for part in parts] == [2 << 20, 5 + (3 << 20), 15]
    assert in_parts([]) == [[]] and Hashing(in_parts([])).result() == []


def test_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strides \[1, 3\]; allowed: contiguous"):
        load_backend("cpu", threads=1).prepare_blake3([torch.zeros(4, 3).t()])


def test_without_a_thread_to_be_had_nobody_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    helpers, held = Helpers(1), tensors()
    monkeypatch.setattr(helpers._pool, "submit", refuse)
    assert helpers.begin(in_parts([host_bytes(tensor) for tensor in held])).result() == expected(held)

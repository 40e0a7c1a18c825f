"""Case 19: whatever happens at any boundary of a checkpoint's write, the one before it loads, and no partial one is listed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mok_service.provenance.chain import StateDigests
from mok_service.provenance.digest import sha256, state_digest
from mok_service.training import checkpoint
from mok_service.training.checkpoint import CheckpointStore, State, cursor_digest, tensor_rows

BOUNDARIES_MAX = 60


def saved(store: CheckpointStore, step: int) -> None:
    state = State({"w": torch.full((64,), float(step))}, {"m": torch.full((64,), -float(step))})
    digests = StateDigests(state_digest(tensor_rows(state.weights)), state_digest(tensor_rows(state.optimizer)),
                           cursor_digest(step))
    store.save(step, sha256(f"head {step}".encode()), state, digests, {"hidden_size": 16})


def at_boundary(patch: pytest.MonkeyPatch, number: int, act: Callable[[], None], *, after: bool) -> None:
    """Calls `act` at one boundary of what follows: before each change of the disk, in the middle of each file, and `after` each
    change."""
    count = itertools.count()

    def boundary() -> None:
        if next(count) == number:
            act()

    def change(real: Callable[..., Any], path_of: Callable[..., Path] | None = None) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            boundary()
            result = real(*arguments, **options)
            if path_of is not None:
                path = path_of(*arguments)
                whole = path.read_bytes()
                path.write_bytes_for_real(whole[:len(whole) // 2])  # type: ignore[attr-defined]
                boundary()
                path.write_bytes_for_real(whole)  # type: ignore[attr-defined]
            if after:
                boundary()
            return result
        return changed

    patch.setattr(Path, "write_bytes_for_real", Path.write_bytes, raising=False)
    patch.setattr(checkpoint, "save_file", change(save_file, lambda _, path: path))
    patch.setattr(Path, "write_bytes", change(Path.write_bytes, lambda path, _: path))
    patch.setattr(Path, "write_text", change(Path.write_text, lambda path, _: path))
    patch.setattr(checkpoint, "_flush", change(checkpoint._flush))
    for name in ("mkdir", "rename"):
        patch.setattr(Path, name, change(getattr(Path, name)))


def both_load(store: CheckpointStore, listed: list[int]) -> None:
    assert [info.step for info in store.list()] == listed
    for info in store.list():
        loaded = store.load(info)
        assert loaded.weights["w"].tolist() == [float(info.step)] * 64
        assert state_digest(tensor_rows(loaded.weights)) == info.state.weights


def killed_at(store: CheckpointStore, number: int) -> bool:
    """Saves the second checkpoint in a process that is killed at a boundary; False when it had fewer."""
    pid = os.fork()
    if pid == 0:
        with pytest.MonkeyPatch.context() as patch:
            at_boundary(patch, number, lambda: os.kill(os.getpid(), signal.SIGKILL), after=True)
            saved(store, 2)
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_a_kill_at_every_boundary(tmp_path: Path) -> None:
    seen, ended = set[tuple[int, ...]](), False
    for number in range(BOUNDARIES_MAX):
        store = CheckpointStore(tmp_path / str(number))
        saved(store, 1)
        ended = not killed_at(store, number)
        listed = [info.step for info in store.list()]
        seen.add(tuple(listed))
        both_load(store, listed)
        saved(store, 2)  # the next attempt
        both_load(store, [1, 2])
        assert not list(store.root.glob(".*")), "what the killed process left is gone"
        shutil.rmtree(store.root)
        if ended:
            break
    assert ended and number > 25 and seen == {(1,), (1, 2)}, "it was killed before the commit and after it"


def test_a_full_disk_at_every_boundary(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(BOUNDARIES_MAX):
        store = CheckpointStore(tmp_path / str(number))
        saved(store, 1)
        try:
            with pytest.MonkeyPatch.context() as patch:
                at_boundary(patch, number, full, after=False)
                saved(store, 2)
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC
        assert not list(store.root.glob(".*")), "nothing half-written stays on a full disk"
        both_load(store, [info.step for info in store.list()])
        saved(store, 2)
        both_load(store, [1, 2])
    assert number > 15


def test_what_a_living_process_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 1)
    written, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(checkpoint, "_flush", lambda _: (os.write(written[1], b"x"), os.read(go_on[0], 1)))
        saved(store, 2)
        os._exit(0)
    assert os.read(written[0], 1) == b"x"
    saved(store, 3)
    assert [path.name for path in store.root.glob(".*")] == [f".step-00000002.{pid}.partial"]
    os.write(go_on[1], b"x" * 100)
    assert os.waitpid(pid, 0)[1] == 0
    both_load(store, [1, 2, 3])

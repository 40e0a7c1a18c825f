"""What this user saw last: the heads of logs, which every later log must begin with."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def seen_file(url: str | None, data_dir: Path) -> Path:
    """Where the last head of a service is kept: by its address, or by its data folder, whose service changes addresses."""
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    server = url.rstrip("/") if url else str(data_dir.resolve())
    return base / "mok" / "heads" / f"{hashlib.sha256(server.encode()).hexdigest()}.json"


def seen_at(path: Path) -> dict[str, Any] | None:
    """The head that is kept there; None for none yet. Raises InvalidSpec for a file that can't be read."""
    from mok_service.errors import InvalidSpec

    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidSpec(f"{path}, which keeps the log's head as seen last, can't be read ({error}); remove it to begin anew",
                          file=str(path)) from None
    return dict(value)


def remember(path: Path, head: dict[str, Any]) -> None:
    """Keep a head in place of the one before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(head) + "\n")
    partial.replace(path)

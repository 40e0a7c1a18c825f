"""A PostgreSQL that can be killed and started again on the same data."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psycopg

from tests.databases import NOBODY, _binaries
from tests.operating.installation import Program, until


class Postgres:
    """Its data are in `folder`, where it also listens; it belongs to nobody, since it refuses to run as root."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        binaries, user = _binaries(folder), NOBODY if os.geteuid() == 0 else None
        data = folder / "data"
        data.mkdir(mode=0o700)
        if user is not None:
            for path in (folder, data):
                os.chown(path, user, user)
        environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
        initdb: list[str | Path] = [binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8",
                                    "--no-locale", "--no-sync"]
        subprocess.run(initdb, user=user, env=environment, cwd=folder, check=True, capture_output=True)
        settings = ["listen_addresses=", f"unix_socket_directories={folder}", "max_connections=200"]
        words = [str(binaries / "postgres"), "-D", str(data), *(word for setting in settings for word in ("-c", setting))]
        self.program = Program(words, environment, folder, "postgres", user=user)
        self._host = folder

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/mok?host={self._host}"

    def start(self) -> None:
        """Start it with an empty database `mok`."""
        self.program.start()
        until(self._answers, "PostgreSQL answers")
        with psycopg.connect(f"host={self._host} user=postgres dbname=postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE mok")

    def _answers(self) -> bool:
        try:
            with psycopg.connect(f"host={self._host} user=postgres dbname=postgres"):
                return True
        except psycopg.OperationalError:
            return False

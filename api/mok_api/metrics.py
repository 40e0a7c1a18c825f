"""What Prometheus is told: what this process has counted, and what the database says."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Labels = tuple[tuple[str, str], ...]


@dataclass
class Metrics:
    """What one process has counted since it started. For one thread: that of the event loop."""

    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    latency: dict[tuple[str, str], list[int]] = field(default_factory=dict)   # by bucket; the last one holds the rest
    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)
    database_errors: int = 0

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer has begun."""
        self.requests[method, route, status] += 1
        self.latency.setdefault((method, route), [0] * (len(SECONDS) + 1))[bisect_left(SECONDS, seconds)] += 1
        self.seconds[method, route] += seconds  # type: ignore[assignment]  # a Counter adds floats as well

    def text(self) -> str:
        """In Prometheus' format."""
        answers: dict[Labels, float] = {(("method", method), ("route", route), ("status", str(status))): count
                                        for (method, route, status), count in self.requests.items()}
        text = metric("mok_http_requests_total", "counter", "Answers of this process.", answers)
        text += "# HELP mok_http_request_seconds Time until an answer begins.\n# TYPE mok_http_request_seconds histogram\n"
        for (method, route), counts in sorted(self.latency.items()):
            below, labels = 0, (("method", method), ("route", route))
            for limit, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
                below += count
                text += f"mok_http_request_seconds_bucket{_shown((*labels, ('le', limit)))} {below}\n"
            text += f"mok_http_request_seconds_sum{_shown(labels)} {self.seconds[method, route]:.9g}\n"
            text += f"mok_http_request_seconds_count{_shown(labels)} {below}\n"
        text += metric("mok_database_errors_total", "counter", "Database errors that requests met.", {(): self.database_errors})
        refused = sum(count for (_, _, status), count in self.requests.items() if status == 401)
        return text + metric("mok_unauthenticated_total", "counter", "Requests without a good API key.", {(): refused})


def metric(name: str, kind: str, meaning: str, values: Mapping[Labels, float]) -> str:
    """One metric."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    return "\n".join(lines + [f"{name}{_shown(labels)} {value:.15g}" for labels, value in sorted(values.items())]) + "\n"


def labelled(name: str, values: Mapping[str, float]) -> dict[Labels, float]:
    """Values by one label."""
    return {((name, label),): value for label, value in values.items()}


def _shown(labels: Iterable[tuple[str, str]]) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

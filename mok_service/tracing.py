"""OpenTelemetry traces, where OTEL_EXPORTER_OTLP_ENDPOINT is set when the process starts and the extra `otel` is installed.

Spans carry names, ids and statuses: never a body, a header or a setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_tracer: Any = None


def start(service: str) -> None:
    """Starts to export spans, by OpenTelemetry's own variables. Without an endpoint it does nothing; to be called before the
    environment is cleaned."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use(provider)


def use(provider: Any) -> None:
    """Makes spans with this provider; None: none."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer("mok-service")


@contextmanager
def span(name: str, **attributes: str) -> Iterator[Any]:
    """A span around a block, with ids as attributes `mok.NAME`. Gives the span, or None where nothing is traced."""
    if _tracer is None:
        yield None
        return
    with _tracer.start_as_current_span(name, record_exception=False) as made:  # messages may hold what users sent
        for key, value in attributes.items():
            made.set_attribute(f"mok.{key}", value)
        yield made

"""What the command shows: tables, one run in detail, and progress while a run trains."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mok_service.provenance.compare import Change, RecordDifference

LINE_SECONDS: Final = 5.0  # between two lines of progress where there is no terminal
RATE_STEPS: Final = 20     # the speed is that of the last so many steps

_COLOURS = {
    "queued": "cyan", "claimed": "cyan", "starting": "cyan", "running": "blue", "stopping": "blue", "paused": "yellow",
    "succeeded": "green", "failed": "red", "cancelled": "yellow",
    "INTACT": "green", "AUDITED": "green", "REPRODUCED": "green", "DIVERGED": "red", "TAMPERED": "red", "INCONCLUSIVE": "yellow",
}

CHANGES_MAX: Final = 20    # of one kind, before the rest is counted
PIPE_WIDTH: Final = 1000
ID_WIDTH: Final = len("run_") + 32



def show(*what: Any) -> None:
    """Print text or tables on stdout; nothing is cut off where that is no terminal."""
    text = all(isinstance(part, str | Text) for part in what)
    if sys.stdout.isatty():
        Console(highlight=False).print(*what, soft_wrap=text, markup=False)
        return
    wide = Console(highlight=False, file=io.StringIO(), width=PIPE_WIDTH)
    with wide.capture() as capture:
        wide.print(*what, soft_wrap=text, markup=False)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """JSON for programs: integers exact, text as it is."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def coloured(word: str | None) -> Text:
    """A status or verdict in its colour."""
    return Text(word or "-", style=_COLOURS.get(word or "", ""))


def jobs_table(items: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each job."""
    table = _table("job", "name", "seed", "steps", "created")
    for job in items:
        table.add_row(job["id"], job["name"], str(job["seed"]), str(job["steps"]), _at(job["created_at"]))
    return table


def runs_table(items: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each run."""
    queued = any(run.get("queue") for run in items)
    table = _table("run", "kind", "status", "step", "weights", "verdict", "created", *(["waits for"] if queued else []))
    for run in items:
        standing = run.get("queue")
        waits = [f"{standing['position']} of {standing['of']}: {standing['why_waiting']}" if standing else ""]
        table.add_row(run["id"], run["kind"], coloured(run["status"]), f"{_or_dash(run['step'])}/{run['steps']}",
                      _short(run["weights"]), coloured(run["verdict"]), _at(run["created_at"]), *(waits if queued else []))
    return table


def quota_table(quota: Mapping[str, Any]) -> Table:
    """A tenant's limits, and what it has of each."""
    table = _table("limit", "at most", "now")
    table.add_row("weight", f"{quota['limits']['weight']:g}", "")
    for name, now in quota["used"].items():
        most = quota["limits"][name]
        table.add_row(name.removesuffix("_max"), "no limit" if most is None else f"{most:,}", f"{now:,}")
    return table


def run_table(run: Mapping[str, Any], job: Mapping[str, Any], verifications: Iterable[Mapping[str, Any]],
              attestation: Mapping[str, Any] | None) -> Table:
    """All that matters of one run."""
    table = _facts()
    rows: list[tuple[str, Any]] = [
        ("run", run["id"]), ("job", f"{run['job']}  {job['name']}"),
        ("kind", run["kind"] + (f" of {run['reproduces']}" if run["reproduces"] else "")), ("status", coloured(run["status"])),
    ]
    if run["stop_reason"] not in (None, "finished"):
        rows.append(("stopped by", run["stop_reason"].replace("_", " ")))
    if run["message"]:
        rows.append(("message", run["message"]))
    if standing := run.get("queue"):
        rows += [("position", f"{standing['position']} of {standing['of']}"), ("waits for", standing["why_waiting"]),
                 ("may start", _at(standing["estimated_start"]))]
    rows += [
        ("step", f"{_or_dash(run['step'])} of {run['steps']}"), ("attempt", str(run["attempt"])), ("seed", str(job["seed"])),
        ("device", f"{run['execution']['count']} x {run['execution']['device']}"),
        ("training", job["digest"]), ("head", _or_dash(run["head"])), ("weights", _or_dash(run["weights"])),
        ("created", _at(run["created_at"])), ("started", _at(run["started_at"])), ("ended", _at(run["ended_at"])),
    ]
    if attestation is not None:
        rows.append(("attested", f"entry {attestation['log_index']} of the log, by key {attestation['key'][:16]}"))
    rows += [_verification_row(v) for v in verifications]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _verification_row(verification: Mapping[str, Any]) -> tuple[str, Any]:
    """A verdict with its message; before there is one how far it is. Behind it where the log has what was signed about it."""
    word, index = verification["verdict"], verification.get("log_index")
    told = verification["message"] or ""
    if word is None:
        word, progress = verification["status"], verification["progress"]
        told = told or f"{progress['done']} of {progress['of']} steps"
    signed = "" if index is None else f"  (signed: entry {index} of the log)"
    return verification["level"], Text.assemble(coloured(word), f"  {told}{signed}")


def record_table(record: Mapping[str, Any]) -> Table:
    """The main facts of a record."""
    identity, chain, code = record["identity"], record["chain"], record["code"] or {}
    hardware = (record["environment"] or {}).get("hardware") or {}
    git, data = code.get("git") or {}, record["data"]
    table = _facts()
    rows: list[tuple[str, Any]] = [(name, _or_dash(identity.get(name))) for name in ("run", "job", "kind", "status")]
    changes = " with changes" if git.get("dirty") else ""
    rows += [
        ("training", record["spec"]["training_digest"]), ("arithmetic", record["arithmetic"]["name"]),
        ("seed", record["seeds"]["seed"]),
        ("data", "-" if data is None else f"{data['digest']}  {len(data['manifest']['files'])} files"),
        ("code", f"{_or_dash(code.get('version'))}  commit {_or_dash(git.get('commit'))}{changes}"),
        ("machine", f"{_or_dash(hardware.get('host'))}  {_or_dash((hardware.get('cpu') or {}).get('model'))}"),
        ("genesis", _or_dash(chain["genesis"])), ("head", f"{_or_dash(chain['head'])}  {chain['length']} records"),
    ]
    rows += [(name, digest) for name, digest in (record["final"] or {}).items()]
    rows += [("checkpoint", f"step {c['step']}  {c['state']['weights']}") for c in record["checkpoints"]]
    rows += [("attempt", f"{a['attempt']}  {_or_dash(a['end'])}  {a['message'] or ''}") for a in record["attempts"]]
    rows += [_verification_row(v) for v in record["verifications"]]
    for name, value in rows:
        table.add_row(name, value)
    return table


def report_lines(report: Mapping[str, Any] | None) -> Iterable[str]:
    """What an audit covered, or what a bisect found."""
    if report is None:
        return
    yield from bisect_lines(report) if report["type"] == "mok.bisect/v1" else _coverage_lines(report)


def _coverage_lines(report: Mapping[str, Any]) -> Iterable[str]:
    yield (f"  covered: {report['steps_covered']} of {report['steps_total']} steps, {report['segments_covered']} of "
           f"{report['segments_total']} segments")
    for row in report["escape"]:
        segments = "1 forged segment" if row["forged_segments"] == 1 else f"{row['forged_segments']} forged segments"
        yield f"  {segments} would have escaped with a chance of {row['percent']} % ({row['chance']})"


def bisect_lines(report: Mapping[str, Any]) -> Iterable[str]:
    """Where two executions come apart: operation, tensors, elements and their bits; notes, and what it took."""
    if report["operation"] is not None:
        yield from _operation_lines(report["operation"])
    if report["state"] is not None:
        yield from _tensor_lines(f"state after step {report['step']}: {report['state']['argument']}", report["state"])
    yield from (f"  note        {note}" for note in report["notes"])
    counts = report["counts"]
    yield (f"  it took     {counts['heads']} heads compared, {counts['steps']} steps computed, {counts['operation_digests']} "
           f"operation digests, {counts['prefixes']} of their prefixes compared")


def _operation_lines(found: Mapping[str, Any]) -> Iterable[str]:
    yield f"  operation   {found['operation']}, number {found['number']} of {found['of']}: {found['place']}"
    yield "  inputs      " + ("equal, so it is this operation itself" if found["inputs_equal"] else "differ:")
    for kind in ("input", "output"):
        for tensor in found[f"{kind}s"]:
            yield from _tensor_lines(f"{kind} {tensor['argument']}", tensor)


def _tensor_lines(what: str, found: Mapping[str, Any]) -> Iterable[str]:
    name = f", {found['name']}" if found["name"] else ""
    element = found["element"]
    at = ", ".join(map(str, element["index"]))
    yield f"  {what}{name}: {found['differing']:,} of {found['elements']:,} elements differ, the first is [{at}]"
    yield f"    first     {element['first_bits']}  {element['first']}"
    yield f"    second    {element['second_bits']}  {element['second']}"


def logs_text(items: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """A text line for each log line."""
    for line in items:
        yield f"{_at(line['at'])} {line['level']:7} {line['message']}"


def estimate_table(validated: Mapping[str, Any]) -> Table:
    """What a job would cost."""
    cost, digest = validated["estimate"], validated["training_digest"]
    table = _facts()
    table.add_row("training", digest or "depends on the seed, which is drawn at submit")
    table.add_row("parameters", f"{cost['parameters_total']:,} in all, {cost['parameters_active']:,} active for a token")
    table.add_row("tokens", f"{cost['tokens_per_step']:,} a step")
    table.add_row("arithmetic", f"{cost['flops_per_token']:,} FLOPs a token")
    table.add_row("memory", f"about {cost['memory_bytes']['total'] / 2**20:,.0f} MiB")
    return table


def difference_lines(difference: RecordDifference) -> Iterable[str]:
    """How two runs compare: what may show in the bits, what may not, then the steps."""
    may = [("training", difference.training), ("data", difference.data)]
    may_not = [("execution", difference.execution), ("environment", difference.environment), ("layout", difference.layout),
               ("attempts", difference.attempts)]
    if difference.code or any(changes for _, changes in may):
        yield "what differs and may show in the bits:"
        yield from _change_lines(may)
        yield from (f"  code: {sentence}" for sentence in difference.code)
    if any(changes for _, changes in may_not):
        yield "what differs and may not show in the bits:"
        yield from _change_lines(may_not)
    if difference.change is not None:
        field = difference.change.field
        yield f"different: step {difference.step}, {field}"
        for value in (difference.change.first, difference.change.second):
            yield f"  {_or_dash(value)}" + (f"  ({_from_bits(value)!r})" if field in ("loss", "grad_norm") and value else "")
    elif difference.outcome == "equal":
        yield f"equal: every step record, {_or_dash(difference.step)} steps"
    elif difference.step is None:
        yield "nothing to compare: one of them has no step records"
    else:
        yield f"equal through step {difference.step}, where the shorter one ends"


def _change_lines(kinds: Sequence[tuple[str, Sequence[Change]]]) -> Iterable[str]:
    for name, changes in kinds:
        for change in changes[:CHANGES_MAX]:
            yield f"  {change.field}: {_or_dash(change.first)} / {_or_dash(change.second)}"
        if len(changes) > CHANGES_MAX:
            yield f"  {name}: and {len(changes) - CHANGES_MAX} more"


def _from_bits(bits: str) -> float:
    from mok_service.provenance.chain import float_from_bits

    return float_from_bits(bits)


class StepProgress(AbstractContextManager["StepProgress"]):
    """A bar with step, loss, tokens/s and estimated time left; without a terminal a line now and then."""

    def __init__(self, label: str, steps: int, *, quiet: bool = False) -> None:
        self._steps = steps
        self._recent: list[tuple[float, int]] = []
        self._quiet, self._lines = quiet, not sys.stdout.isatty()
        self._said_at = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"),
            console=Console(highlight=False), disable=quiet or self._lines,
        )
        self._task = self._bar.add_task(label, total=steps, told="")
        self._label = label

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def of(self, steps: int) -> None:
        """How many steps there are in all, where that wasn't known before."""
        self._steps = steps
        self._bar.update(self._task, total=steps)

    def state(self, status: str) -> None:
        """What the run is doing while it isn't stepping."""
        self._bar.update(self._task, told=status)

    def step(self, step: int, loss: float | None, tokens: int | None, seconds: float | None) -> None:
        """A step is done; `seconds` is what it took."""
        if seconds and tokens:
            self._recent = [*self._recent[-RATE_STEPS + 1:], (seconds, tokens)]
        told = self._told(step, loss)
        self._bar.update(self._task, completed=step, told=told)
        now = time.monotonic()
        if self._lines and not self._quiet and step > 0 and (step == self._steps or now - self._said_at >= LINE_SECONDS):
            self._said_at = now
            show(f"{self._label}  step {step}/{self._steps}  {told}")

    def _told(self, step: int, loss: float | None) -> str:
        parts = [f"loss {loss:.4f}"] if loss is not None else []
        spent = sum(seconds for seconds, _ in self._recent)
        if spent > 0:
            left = (self._steps - step) * spent / len(self._recent)
            parts += [f"{sum(tokens for _, tokens in self._recent) / spent:,.0f} tokens/s", f"{duration(left)} left"]
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """45 s, 3:05 min, 2:10 h."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02} h"


def _facts() -> Table:
    """A name and a value a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True, min_width=ID_WIDTH if column in ("run", "job") else None)
    return table


def _at(text: str | None) -> str:
    """A time of REST in the reader's own zone."""
    return "-" if text is None else datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _short(digest: str | None) -> str:
    return "-" if digest is None else digest[: len("sha256:") + 12]


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)

"""Audits: which parts of a run are computed again, and what that shows. Values and arithmetic; no I/O.

A run's checkpoints cut it into segments. An audit draws some of them by a rule that anybody can follow with `sha256sum`, from a
seed that it records, and replays those. docs/provenance.md has rule and odds in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import comb
from typing import Any, Final, Self

from mok_service.errors import InvalidSpec
from mok_service.provenance.canonical import decimal_text
from mok_service.provenance.digest import canonical_digest
from mok_service.provenance.verify import Finding

PLAN_TYPE: Final = "mok.audit-plan/v1"
DRAW_TYPE: Final = "mok.audit-draw/v1"
REPORT_TYPE: Final = "mok.audit-report/v1"
SEGMENTS_DEFAULT: Final = 4
FORGED_COUNTS: Final = (1, 2, 5, 10, 20)  # the report states the odds for so many forged segments


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """The steps after `start` up to `end`. The first segment (start 0) has the initial state, record 0, too."""

    start: int
    end: int

    @property
    def steps(self) -> int:
        return self.end - self.start

    @property
    def first_record(self) -> int:
        """The step of the first record that replaying it gives."""
        return self.start + 1 if self.start else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit replays: the segments drawn, in order of steps, of all `count` segments of the run."""

    seed: int
    head: str                       # the audited run's chain head: the draw depends on it
    last_step: int                  # of the audited run's records
    count: int                      # segments of the run
    segments: tuple[Segment, ...]   # drawn

    @property
    def steps(self) -> int:
        """Steps to replay."""
        return sum(segment.steps for segment in self.segments)

    @property
    def end(self) -> int:
        """The last step to replay."""
        return self.segments[-1].end

    def next_step(self, last: int | None) -> int | None:
        """The step of the record that comes after that of step `last` (None: there is none yet); None after the last one."""
        for segment in self.segments:
            if last is None or last < segment.first_record:
                return segment.first_record
            if last < segment.end:
                return last + 1
        return None

    def done(self, last: int | None) -> int:
        """How many steps have been replayed when the record of step `last` is the last one on file."""
        return sum(min(max((last or 0) - s.start, 0), s.steps) for s in self.segments)

    def rest(self, last: int | None) -> tuple[Segment, ...]:
        """The segments to go on with: the one that `last` lies in is replayed from its start; so is one that ends there, since
        its final state may not have been compared."""
        return tuple(s for s in self.segments if last is None or s.end >= last)

    def document(self) -> dict[str, Any]:
        """As it's stored, shown and signed."""
        return {
            "type": PLAN_TYPE, "seed": decimal_text(self.seed), "head": self.head, "last_step": self.last_step,
            "segments_total": self.count, "segments": [{"from": s.start, "to": s.end} for s in self.segments],
        }

    @classmethod
    def from_document(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `document`."""
        segments = tuple(Segment(row["from"], row["to"]) for row in value["segments"])
        return cls(int(value["seed"]), value["head"], value["last_step"], value["segments_total"], segments)


def segments_of(checkpoint_steps: Iterable[int]) -> list[Segment]:
    """The segments between step 0 and the steps of the checkpoints that are there."""
    return [Segment(start, end) for start, end in pairwise(sorted({0, *checkpoint_steps}))]


def draw(seed: int, head: str, last_step: int, checkpoint_steps: Iterable[int], count: int | None = None) -> Plan:
    """A plan of `count` segments (None: up to four), uniform without replacement, as seed and chain head determine.

    Each segment gets the digest of {"type", "seed", "head", "from", "to"}; those with the lowest digests are drawn. Raises
    InvalidSpec when the run has fewer segments, or none.
    """
    of = segments_of(checkpoint_steps)
    if not of:
        raise InvalidSpec("the run has no checkpoint, so there is no segment to audit; allowed: level rerun", field="segments")
    wanted = min(SEGMENTS_DEFAULT, len(of)) if count is None else count
    if not 1 <= wanted <= len(of):
        raise InvalidSpec(f"segments: {wanted} isn't allowed; allowed: 1 to {len(of)}, the segments of this run",
                          field="segments", value=wanted, allowed=len(of))
    drawn = sorted(of, key=lambda segment: _lot(seed, head, segment))[:wanted]
    return Plan(seed, head, last_step, len(of), tuple(sorted(drawn)))


def whole(head: str, last_step: int) -> Plan:
    """The plan of a rerun: everything, as one segment; nothing is drawn."""
    return Plan(0, head, last_step, 1, (Segment(0, last_step),))


def _lot(seed: int, head: str, segment: Segment) -> str:
    return canonical_digest({
        "type": DRAW_TYPE, "seed": decimal_text(seed), "head": head, "from": decimal_text(segment.start),
        "to": decimal_text(segment.end),
    }).hex


def escape_odds(count: int, drawn: int, forged: int) -> Fraction:
    """The chance that none of `forged` among `count` segments is drawn: C(count - forged, drawn) / C(count, drawn)."""
    assert 0 <= forged <= count and 0 <= drawn <= count, (count, drawn, forged)
    return Fraction(comb(count - forged, drawn), comb(count, drawn))


def report(plan: Plan) -> dict[str, Any]:
    """What an audit that found nothing shows: the share of the steps that was computed again, and the odds of a forger.

    Fractions are exact, as text; `percent` is rounded up to two decimals, so that it never says less than the odds.
    """
    drawn = len(plan.segments)
    odds = [(forged, escape_odds(plan.count, drawn, forged)) for forged in FORGED_COUNTS if forged <= plan.count]
    return {
        "type": REPORT_TYPE, "steps_total": plan.last_step, "steps_covered": plan.steps, "segments_total": plan.count,
        "segments_covered": drawn, "coverage": _fraction(Fraction(plan.steps, plan.last_step)),
        "escape": [{"forged_segments": forged, "chance": _fraction(chance), "percent": _percent(chance)}
                   for forged, chance in odds],
    }


def audited(plan: Plan, drift: Sequence[str] = ()) -> Finding:
    """The verdict on a run whose drawn segments all gave the bits on record. `drift` says how the code differs."""
    told = report(plan)
    steps = f"{told['steps_covered']} of {told['steps_total']} steps"
    segments = f"{told['segments_covered']} of {told['segments_total']} segments"
    first = told["escape"][0]
    odds = ("every step was computed again, as in a rerun" if plan.steps == plan.last_step
            else f"one forged segment had a chance of {first['chance']} ({first['percent']} %) not to be drawn")
    note = f" The code differs ({'; '.join(drift)}), and yet the bits are equal." if drift else ""
    return Finding("AUDITED", f"{steps} ({segments}, drawn from seed {plan.seed}) gave the bits on record; {odds}.{note}")


def _fraction(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _percent(value: Fraction) -> str:
    hundredths = -(-value.numerator * 10_000 // value.denominator)
    return f"{hundredths // 100}.{hundredths % 100:02}"

"""Plans: drawn by a rule that anybody can follow, uniformly; and the odds that the report states are the true ones."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest

from mok_service.errors import InvalidSpec
from mok_service.provenance.audit import Plan, Segment, draw, escape_odds, report, segments_of, whole

HEAD = "sha256:" + "a" * 64
TEN = range(10, 101, 10)  # checkpoints that make ten segments


def test_the_draw_can_be_followed_by_hand() -> None:
    """As docs/provenance.md says: sorted keys, no spaces, SHA-256, the lowest ones."""
    lots = {}
    for start, end in zip(range(0, 100, 10), TEN, strict=True):
        text = json.dumps({"from": str(start), "head": HEAD, "seed": "7", "to": str(end), "type": "mok.audit-draw/v1"},
                          separators=(",", ":"))
        lots[hashlib.sha256(text.encode()).hexdigest()] = (start, end)
    expected = sorted(lots[lot] for lot in sorted(lots)[:3])
    plan = draw(7, HEAD, 100, TEN, 3)
    assert [(s.start, s.end) for s in plan.segments] == expected
    assert (plan.count, plan.steps, plan.last_step) == (10, 30, 100)
    assert Plan.from_document(json.loads(json.dumps(plan.document()))) == plan
    assert draw(2**63 - 1, HEAD, 100, TEN, 3).document()["seed"] == "9223372036854775807"
    assert draw(7, HEAD.replace("a", "b"), 100, TEN, 3) != plan, "a seed that is known before the run ends is of no use"


def test_segments_lie_between_the_checkpoints_that_are_there() -> None:
    assert segments_of([5, 20, 0]) == [Segment(0, 5), Segment(5, 20)] and segments_of([]) == segments_of([0]) == []
    assert len(draw(1, HEAD, 9, [3, 6, 9]).segments) == 3 and len(draw(1, HEAD, 100, TEN).segments) == 4
    for count in (0, 11):
        with pytest.raises(InvalidSpec, match="allowed: 1 to 10"):
            draw(1, HEAD, 100, TEN, count)
    with pytest.raises(InvalidSpec, match="level rerun"):
        draw(1, HEAD, 3, [], 1)


SEEDS = 4000
# Standard deviations of a binomial: a right rule misses such a bound for one choice of the seeds in 1.7 million. They are fixed.
SIGMAS = 5.0


@pytest.mark.parametrize(("drawn", "forged"), [(1, 1), (3, 1), (3, 2), (4, 5), (7, 1)])
def test_forged_segments_escape_as_often_as_is_stated(drawn: int, forged: int) -> None:
    bad = set(segments_of(TEN)[2:2 + forged])
    escaped, seen = 0, Counter[Segment]()
    for seed in range(SEEDS):
        segments = draw(seed, HEAD, 100, TEN, drawn).segments
        assert len(set(segments)) == drawn and list(segments) == sorted(segments)
        seen.update(segments)
        escaped += not bad & set(segments)
    odds = float(escape_odds(10, drawn, forged))
    assert abs(escaped - SEEDS * odds) <= SIGMAS * math.sqrt(SEEDS * odds * (1 - odds)), (escaped, SEEDS * odds)
    share = drawn / 10
    for segment in segments_of(TEN):
        assert abs(seen[segment] - SEEDS * share) <= SIGMAS * math.sqrt(SEEDS * share * (1 - share)), segment


@pytest.mark.parametrize(("count", "drawn", "forged"), [(5, 2, 1), (6, 3, 2), (6, 6, 1), (4, 0, 1), (7, 2, 7), (3, 1, 0)])
def test_the_odds_are_those_of_counting(count: int, drawn: int, forged: int) -> None:
    all_draws = list(combinations(range(count), drawn))
    free = [chosen for chosen in all_draws if not set(chosen) & set(range(forged))]
    assert escape_odds(count, drawn, forged) == Fraction(len(free), len(all_draws))


def test_the_report_states_exact_fractions_and_never_less_than_the_odds() -> None:
    told = report(draw(7, HEAD, 110, TEN, 3))
    assert (told["steps_total"], told["steps_covered"], told["coverage"]) == (110, 30, "3/11")
    assert told["escape"] == [
        {"forged_segments": 1, "chance": "7/10", "percent": "70.00"},
        {"forged_segments": 2, "chance": "7/15", "percent": "46.67"},
        {"forged_segments": 5, "chance": "1/12", "percent": "8.34"}, {"forged_segments": 10, "chance": "0/1", "percent": "0.00"}]
    assert report(whole(HEAD, 9))["coverage"] == "1/1"


def test_progress_and_what_is_left_of_a_plan() -> None:
    plan = Plan(1, HEAD, 9, 4, (Segment(0, 2), Segment(4, 5), Segment(7, 9)))
    order, last = [], None
    while (step := plan.next_step(last)) is not None:
        order.append(step)
        last = step
    assert order == [0, 1, 2, 5, 8, 9]
    assert [plan.done(step) for step in (None, *order)] == [0, 0, 1, 2, 3, 4, 5]
    lefts = {None: 3, 0: 3, 1: 3, 2: 3, 5: 2, 8: 1, 9: 1}  # a segment that ends there is replayed: its end wasn't compared yet
    assert {step: len(plan.rest(step)) for step in lefts} == lefts

"""`python -m tests.simulation --seed N` plays one world and prints what happens in it; `--seeds N` plays many, on all cores."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from os import cpu_count

from tests.simulation import properties
from tests.simulation.play import failures, play

CHUNK = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="play this world, and print what happens")
    which.add_argument("--seeds", type=int, help="play so many worlds, and print the seeds of those that go wrong")
    parser.add_argument("--first", type=int, default=0, help="the first of --seeds")
    parser.add_argument("--processes", type=int, default=cpu_count() or 1)
    given = parser.parse_args()
    return one(given.seed) if given.seed is not None else many(given.first, given.seeds, given.processes)


def one(seed: int) -> int:
    trace: list[str] = []
    try:
        play(seed, trace)
    except (Exception, properties.Violated):
        print("\n".join(trace))
        traceback.print_exc()
        return 1
    print("\n".join(trace))
    return 0


def many(first: int, count: int, processes: int) -> int:
    began, found = time.monotonic(), list[tuple[int, str]]()
    ends, seen = Counter[str](), Counter[tuple[str, str]]()
    chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    with ProcessPoolExecutor(processes) as pool:
        for wrong, of_ends, of_seen in pool.map(chunk, chunks):
            found += wrong
            ends += of_ends
            seen += of_seen
            for seed, why in wrong:
                print(f"seed {seed}: {why}", flush=True)
    seconds = time.monotonic() - began
    print(f"{count} worlds in {seconds:.0f} s, {len(found)} went wrong; runs ended: {dict(ends.most_common())}")
    print(f"transitions: { {f'{old} -> {new}': number for (old, new), number in seen.most_common()} }")
    return 1 if found else 0


def chunk(seeds: range) -> tuple[list[tuple[int, str]], Counter[str], Counter[tuple[str, str]]]:
    properties.ENDS.clear()
    properties.SEEN.clear()
    return failures(seeds), properties.ENDS.copy(), properties.SEEN.copy()


if __name__ == "__main__":
    sys.exit(main())

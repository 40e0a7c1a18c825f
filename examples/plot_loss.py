"""Plots the loss of runs, from their stored step records, as an image.

    python examples/plot_loss.py latest --out docs/images/loss.png

Reads the embedded data folder, or a running service (--url). Needs matplotlib: pip install 'mok-service[plot]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot as plt

from mok_service.cli.options import DATA_DIR, reader, run_id


def main() -> None:
    """Parse the command line, and write the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="id of a run, or latest")
    parser.add_argument("--out", type=Path, default=Path("loss.png"), help="the image; its ending says the format")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--url")
    options = parser.parse_args()

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    with reader(options.url, options.data_dir) as source:
        for name in options.runs:
            run = source.run(run_id(source, name))
            job = source.job(run["job"])
            points = [(step["step"], step["loss"]) for step in source.steps(run["id"]) if step["loss"] is not None]
            label = f"{job['name']}, seed {job['seed']}: {(run['weights'] or 'no weights yet')[:19]}"
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(options.out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()

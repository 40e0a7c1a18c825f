"""A whole training step of a tiny Mixture-of-Experts model: ours in fp32 and bf16 against Hugging Face with torch's AdamW.

    python -m benchmarks.training_step [--threads 1 2] [--steps 5]

Same shapes and fresh batches on both sides; each side in a process of its own for every thread count, so that neither's thread
pool disturbs the other's and peak memory can be told apart; the sides take turns three times and the best median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

MODEL: dict[str, Any] = {
    "hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 8, "head_size": 32, "experts": 8, "top_k": 2,
    "expert_intermediate_size": 512, "vocabulary_size": 512, "qk_norm": "head",
}  # fmt: skip
SEQUENCES, LENGTH = 8, 256


def ours(precision: str, threads: int, steps: int) -> list[float]:
    """Seconds of each step after the first."""
    from mok_service.kernels import load_backend
    from mok_service.spec import parse_job, resolve
    from mok_service.training.data import open_corpus
    from mok_service.training.loop import Trainer

    job = resolve(parse_job({"training": {
        "name": "benchmark", "seed": 1, "precision": precision, "model": MODEL, "sequence_length": LENGTH,
        "data": {"source": "python-stdlib", "max_bytes": 2_000_000}, "batch": {"sequences": SEQUENCES},
        "optimizer": {"clipping": "global"}, "steps": 1000, "digest_interval": 1000,
    }}))  # fmt: skip
    trainer = Trainer(job, open_corpus(job.training.data, [], 512), load_backend("cpu", threads=threads))
    return [trainer.advance().seconds for _ in range(steps + 1)][1:]


def theirs(threads: int, steps: int) -> list[float]:
    """The same model by Hugging Face: fp32, AdamW, global clipping."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=32, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=512, intermediate_size=512, vocab_size=512, norm_topk_prob=True,
        max_position_embeddings=LENGTH, router_aux_loss_coef=0.0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(steps + 1):
        ids = torch.randint(0, 512, (SEQUENCES, LENGTH + 1))
        start = time.perf_counter()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 512), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def child(side: str, threads: int, steps: int) -> None:
    seconds = theirs(threads, steps) if side == "Hugging Face" else ours(side, threads, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"median": statistics.median(seconds), "peak_mib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.threads[0], arguments.steps)
        return
    print("| threads | side | step, ms | of Hugging Face's time | peak memory, MiB |\n| --- | --- | --- | --- | --- |")
    for threads in arguments.threads:
        best: dict[str, dict[str, float]] = {}
        for _ in range(3):
            for side in ("Hugging Face", "fp32", "bf16"):
                command = [sys.executable, "-m", "benchmarks.training_step", "--child", side, "--threads", str(threads)]
                command += ["--steps", str(arguments.steps)]
                environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
                got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
                if side not in best or got["median"] < best[side]["median"]:
                    best[side] = got
        base = best["Hugging Face"]["median"]
        for side, row in best.items():
            name = side if side == "Hugging Face" else f"MoK service, {side}"
            print(f"| {threads} | {name} | {row['median'] * 1e3:.0f} | {row['median'] / base:.2f} | {row['peak_mib']:.0f} |")


if __name__ == "__main__":
    main()

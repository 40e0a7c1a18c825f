"""A whole training step of a 1B-class Mixture-of-Experts model on one GPU: ours in bf16 against Hugging Face with torch's AdamW.

    python -m benchmarks.gpu_training_step [--layers 2] [--steps 8]

OLMoE's shape with fewer layers, 4 sequences of 4,096 tokens. Ours: fp32 master weights and moments, bf16 operands, every bit
defined. Theirs: the library's OLMoE with bf16 weights and moments, fused AdamW and SDPA attention. Prints tokens/s, the share
of the measured peak of a bf16 product, and where our time goes, operation by operation.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SEQUENCES, LENGTH = 4, 4096


def timed(step: Callable[[], object], count: int) -> float:
    """Median seconds of a step, the device idle before and after; two to warm up."""
    seconds = []
    for i in range(count + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def peak() -> float:
    """FLOP/s of an 8192^3 bf16 product by cuBLAS."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return float(2 * 8192**3 / timed(lambda: a @ b, 20))


def our_trainer(layers: int) -> Any:
    from mok_service.kernels import load_backend
    from mok_service.spec import parse_job, resolve
    from mok_service.training.data import open_corpus
    from mok_service.training.loop import Trainer

    training = {
        "name": "benchmark", "seed": 1, "precision": "bf16", "model": {"preset": "olmoe-1b-7b", "layers": layers},
        "sequence_length": LENGTH, "data": {"source": "python-stdlib", "max_bytes": 4_000_000}, "batch": {"sequences": SEQUENCES},
        "optimizer": {"clipping": "global"}, "steps": 1000, "digest_interval": 1000,
    }  # fmt: skip
    job = resolve(parse_job({"training": training, "execution": {"device": "cuda", "micro_batches": 1}}))
    corpus = open_corpus(job.training.data, [], job.training.model.vocabulary_size)
    return Trainer(job, corpus, load_backend("cuda", own_stream=True))


def their_step(layers: int) -> Callable[[], object]:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(1)
    config = OlmoeConfig(
        hidden_size=2048, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
        num_experts=64, num_experts_per_tok=8, vocab_size=50304, max_position_embeddings=LENGTH, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = OlmoeForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        ids = torch.randint(0, 50304, (SEQUENCES, LENGTH + 1), device="cuda")
        logits = model(ids[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def where_time_goes(trainer: Any) -> list[tuple[str, int, float]]:
    """(operation, calls, seconds) of one step, the device idle around every operation."""
    rows: dict[str, list[float]] = collections.defaultdict(list)
    call = trainer.backend.call

    def watched(operation: str, **fields: Any) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = call(operation, **fields)
        torch.cuda.synchronize()
        rows[operation].append(time.perf_counter() - start)
        return result

    trainer.backend.call = watched
    trainer.backend.stream, stream = None, trainer.backend.stream  # no graph: one operation after the other
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        trainer.advance()
    total = time.perf_counter() - start
    trainer.backend.call, trainer.backend.stream = call, stream
    spent = sum(sum(values) for values in rows.values())
    return [*((name, len(v), sum(v)) for name, v in rows.items()), ("everything else", 1, total - spent)]


def main() -> None:
    from mok_service.spec import estimate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    best = peak()
    trainer = our_trainer(arguments.layers)
    cost = estimate(trainer.job)
    tokens = SEQUENCES * LENGTH
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16 8192^3: {best / 1e12:.0f} TFLOP/s")
    print(f"{cost.parameters_total / 1e9:.2f} B parameters, {cost.flops_per_token / 1e9:.2f} GFLOP a token")
    print("| side | step, ms | tokens/s | share of the peak |\n| --- | --- | --- | --- |")
    ours = timed(trainer.advance, arguments.steps)
    sides = {"MoK service, bf16, fp32 state": ours}
    table = where_time_goes(trainer)
    del trainer
    torch.cuda.empty_cache()
    try:
        sides["Hugging Face, bf16"] = timed(their_step(arguments.layers), arguments.steps)
    except (ImportError, torch.OutOfMemoryError) as error:
        print(f"Hugging Face could not be measured: {type(error).__name__}: {error}")
    for side, seconds in sides.items():
        share = cost.flops_per_token * tokens / seconds / best
        print(f"| {side} | {seconds * 1e3:.1f} | {tokens / seconds:,.0f} | {share:.2f} |")
    print("\n| operation | calls | ms | share |\n| --- | --- | --- | --- |")
    whole = sum(seconds for _, _, seconds in table)
    for name, calls, seconds in sorted(table, key=lambda row: -row[2]):
        print(f"| {name} | {calls} | {seconds * 1e3:.2f} | {seconds / whole:.2f} |")


if __name__ == "__main__":
    main()

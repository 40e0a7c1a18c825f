"""The learning-rate schedule and the scalars of one AdamW update (docs/arithmetic.md, 13).

Computed in binary64 by the backend's own functions, so that they're the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mok_service.spec import OptimizerSpec

Scalar = Callable[..., float]  # scalar(name, x, y): pow, cos, exp, log


def learning_rate(spec: OptimizerSpec, step: int, steps: int, scalar: Scalar) -> float:
    """The rate of a step (from 1), rounded to binary32: warm-up, then constant, or cosine to lr * min_lr_ratio at the last."""
    if step <= spec.warmup_steps:
        return float(np.float32(spec.lr * step / spec.warmup_steps))
    if spec.schedule == "constant":
        return float(np.float32(spec.lr))
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    low = spec.lr * spec.min_lr_ratio
    return float(np.float32(low + (spec.lr - low) * (0.5 * (1.0 + scalar("cos", np.pi * progress)))))


def clip_scale(spec: OptimizerSpec, norm: float, previous_norm: float | None) -> float:
    """What gradients are multiplied by, binary32: 1, or at most max_norm / norm of this step or of the step before."""
    used = {"none": None, "global": norm, "previous": previous_norm}[spec.clipping]
    if used is None:
        return 1.0
    return float(min(np.float32(1), np.float32(spec.max_norm) / (np.float32(used) + np.float32(1e-6))))


def update_scalars(spec: OptimizerSpec, step: int, scalar: Scalar) -> dict[str, float]:
    """The scalars of mok_adamw that a step's number determines (weight decay, rate and scales apart)."""
    return {
        "beta1": spec.beta1,
        "beta2": spec.beta2,
        "one_minus_beta1": 1.0 - spec.beta1,
        "one_minus_beta2": 1.0 - spec.beta2,
        "correction1": 1.0 / (1.0 - scalar("pow", spec.beta1, float(step))),
        "correction2": 1.0 / (1.0 - scalar("pow", spec.beta2, float(step))),
        "epsilon": spec.epsilon,
    }

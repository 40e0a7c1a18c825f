"""Hypothesis runs the same cases on every machine: a failure seen once is seen again."""

from hypothesis import settings

settings.register_profile("spec", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("spec")

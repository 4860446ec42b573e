"""Benchmark of the whole training step: `eyas bench step`, or `python -m tasks.trainer.bench step`."""

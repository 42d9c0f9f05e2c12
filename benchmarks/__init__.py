"""Figures with bars: how fast the cache is, beside the yardsticks, measured in one run. `python -m benchmarks`."""

"""Benchmarks: each prints a table of ratios measured in one interleaved run."""

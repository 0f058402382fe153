"""Eviction policies side by side on one cache, one request after the other: hit rates, a table and a plot."""

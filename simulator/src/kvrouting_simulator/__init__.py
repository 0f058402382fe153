"""Engines without a GPU, workloads, experiments, the load generator and the demo."""

"""One report for experiments, the load generator and the demo."""

from kvrouting_simulator.report.records import PoolMark, RequestRecord
from kvrouting_simulator.report.summary import Percentiles, Summary, WorkerLoad, summarise

__all__ = ["Percentiles", "PoolMark", "RequestRecord", "Summary", "WorkerLoad", "summarise"]

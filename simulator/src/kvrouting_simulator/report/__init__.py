"""One report for experiments, the load generator and the demo. Page and plots are apart: they load matplotlib."""

from kvrouting_simulator.report.document import Report, Run, join_reports, load_report, save_report
from kvrouting_simulator.report.records import PoolMark, RequestRecord
from kvrouting_simulator.report.summary import Percentiles, Summary, WorkerLoad, summarise

__all__ = [
    "Percentiles",
    "PoolMark",
    "Report",
    "RequestRecord",
    "Run",
    "Summary",
    "WorkerLoad",
    "join_reports",
    "load_report",
    "save_report",
    "summarise",
]

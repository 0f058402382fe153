"""Requests to replay: seeded generators, readers of published traces, and the clients that send them."""

from kvrouting_simulator.workloads.arrivals import (
    Arrivals,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
)
from kvrouting_simulator.workloads.calibration_load import CalibrationLoad
from kvrouting_simulator.workloads.catalogue import WORKLOAD_NAMES, build_workload
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.gsp import Gsp
from kvrouting_simulator.workloads.long_documents import LongDocuments
from kvrouting_simulator.workloads.multi_turn import MultiTurn
from kvrouting_simulator.workloads.paper_client import PaperClient
from kvrouting_simulator.workloads.spec import WorkloadSpec
from kvrouting_simulator.workloads.trace_files import TraceError, read_agent_sessions, read_azure, read_mooncake
from kvrouting_simulator.workloads.traces import AgentSessions, AzureTrace, MooncakeTrace
from kvrouting_simulator.workloads.work_item import Client, ReadyRequest, WorkItem, Workload

__all__ = [
    "WORKLOAD_NAMES",
    "AgentSessions",
    "Arrivals",
    "AzureTrace",
    "CalibrationLoad",
    "Client",
    "GammaArrivals",
    "Gsp",
    "LongDocuments",
    "MooncakeTrace",
    "MultiTurn",
    "PaperClient",
    "PoissonArrivals",
    "ReadyRequest",
    "RecordedArrivals",
    "ScheduledClient",
    "TraceError",
    "WorkItem",
    "Workload",
    "WorkloadSpec",
    "build_workload",
    "read_agent_sessions",
    "read_azure",
    "read_mooncake",
]

"""Routing policies and engine models together on a virtual clock: same scenario, same bytes."""

from kvrouting_simulator.experiment.scenario import Delays, Failure, Scenario, WorkerSpec
from kvrouting_simulator.experiment.scenario_file import ScenarioError, build_scenario, read_values
from kvrouting_simulator.experiment.simulation import PolicyStuckError, Simulation, simulate

__all__ = [
    "Delays",
    "Failure",
    "PolicyStuckError",
    "Scenario",
    "ScenarioError",
    "Simulation",
    "WorkerSpec",
    "build_scenario",
    "read_values",
    "simulate",
]

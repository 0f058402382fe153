"""`python -m kvrouting_simulator.eviction_study`."""

from __future__ import annotations

from kvrouting_simulator.eviction_study.command import evictions

evictions()

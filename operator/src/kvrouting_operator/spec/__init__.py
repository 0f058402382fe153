"""The typed definition of KVRoutingPool's spec: schema, documentation and parser are all made from it."""

from __future__ import annotations

from kvrouting_operator.spec.pool import PoolSpec

__all__ = ["PoolSpec"]

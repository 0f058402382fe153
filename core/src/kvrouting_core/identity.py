"""Who a worker is: one data-parallel rank of one pod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""`<pod uid>/<data-parallel rank>`: the routing target. A pod uid is never used twice, so neither is this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """One rank of one pod of one pool, as it names itself in its handshake."""

    pool: str
    pod_uid: str
    dp_rank: int

    def __post_init__(self) -> None:
        if not self.pool:
            raise ValueError("pool is empty: a worker names the pool it belongs to")
        if not self.pod_uid or "/" in self.pod_uid:
            raise ValueError(f"pod_uid {self.pod_uid!r} must be a non-empty name without '/'")
        if self.dp_rank < 0:
            raise ValueError(f"dp_rank {self.dp_rank} must be 0 or more")

    @property
    def worker_id(self) -> WorkerId:
        """The routing target."""
        return WorkerId(f"{self.pod_uid}/{self.dp_rank}")

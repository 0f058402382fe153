"""The typed definition of KVRoutingPool's status: what is seen, never what is wished."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.part import Part, without_absent

ConditionType = Literal[
    "Ready",
    "Progressing",
    "WorkersAvailable",
    "RouterAvailable",
    "EventsFlowing",
    "CacheSynced",
    "EvictionPolicyActive",
    "Draining",
]
Truth = Literal["True", "False", "Unknown"]
Phase = Literal["Pending", "Starting", "Syncing", "Ready", "Suspect", "Draining", "Failed"]


class Condition(Part, frozen=True, kw_only=True):
    """One aspect of the pool's state."""

    type: Annotated[ConditionType, Meta(description="Which aspect.")]
    status: Annotated[Truth, Meta(description="Whether it holds.")]
    reason: Annotated[str, Meta(description="Why, in one word.", pattern="^[A-Za-z][A-Za-z0-9]*$", max_length=1024)]
    message: Annotated[str, Meta(description="Why, in a sentence.", max_length=32768)] = ""
    last_transition_time: Annotated[
        str, Meta(description="When its status changed last.", extra_json_schema={"format": "date-time"})
    ]
    observed_generation: Annotated[int, Meta(description="Generation of the spec that it speaks of.")] = 0


class WorkerStatus(Part, frozen=True, kw_only=True):
    """One worker pod. Figures are sums over its data-parallel ranks, and absent while no router knows it."""

    pod: Annotated[str, Meta(description="Name of the pod.")]
    node: Annotated[str | None, Meta(description="Node that it runs on.")] = None
    phase: Annotated[
        Phase,
        Meta(
            description="Pending: it has no node or no running container; Starting: the engine loads; Syncing: "
            "no router has its cache yet; Ready: requests may go to it; Suspect: routers avoid it; Draining: it "
            "leaves; Failed: its containers do not run."
        ),
    ]
    reason: Annotated[str | None, Meta(description="Why it is not ready, in one word.")] = None
    message: Annotated[str | None, Meta(description="Why it is not ready, in a sentence.")] = None
    epoch: Annotated[str | None, Meta(description="The engine's process; another one for each start.")] = None
    mirror: Annotated[
        Literal["exact", "partial", "approximate"] | None,
        Meta(description="What the routers know of its cache: all, a subset, or a guess."),
    ] = None
    cached_tokens: Annotated[int | None, Meta(description="Tokens in its prefix cache.")] = None
    unique_cached_tokens: Annotated[int | None, Meta(description="Tokens that no other worker has cached.")] = None
    capacity_tokens: Annotated[int | None, Meta(description="Size of its KV cache.")] = None
    in_flight: Annotated[int | None, Meta(description="Requests under way, over all routers.")] = None
    sync_lag_seconds: Annotated[float | None, Meta(description="Since the last word from its sidecar.")] = None
    eviction_policy: Annotated[str | None, Meta(description="Eviction policy that the engine reports.")] = None
    eviction_policy_live: Annotated[bool | None, Meta(description="Whether the engine proves it at work.")] = None


class PoolStatus(Part, frozen=True, kw_only=True):
    """What is seen of the pool."""

    observed_generation: Annotated[int, Meta(description="Generation of the spec that the operator has acted on.")] = 0
    replicas: Annotated[int, Meta(description="Worker pods that exist and do not leave.")] = 0
    ready_replicas: Annotated[int, Meta(description="Worker pods that are ready.")] = 0
    selector: Annotated[str, Meta(description="Label selector of the worker pods, for autoscalers.")] = ""
    endpoint: Annotated[str, Meta(description="Address of the router's Service inside the cluster.")] = ""
    workers: Annotated[tuple[WorkerStatus, ...], Meta(description="The worker pods.")] = ()
    conditions: Annotated[tuple[Condition, ...], Meta(description="The pool's state by aspect.")] = ()


def plain_status(status: PoolStatus) -> dict[str, object]:
    """As it is written: absent fields left out, empty lists kept so that they replace older ones."""
    plain = without_absent(msgspec.to_builtins(status))
    assert isinstance(plain, dict)  # noqa: S101
    return plain

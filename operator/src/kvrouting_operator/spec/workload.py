"""What every container of a pool can be given: resources, image pull policy."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.part import QUANTITY_PATTERN, Part, Quantity

PullPolicy = Literal["Always", "IfNotPresent", "Never"]


class Resources(Part, frozen=True, kw_only=True):
    """Requests and limits of a container."""

    requests: Annotated[dict[str, Quantity], Meta(description="What is reserved.", max_length=16)] = msgspec.field(
        default_factory=dict
    )
    limits: Annotated[dict[str, Quantity], Meta(description="What is never exceeded.", max_length=16)] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for name, quantity in {**self.requests, **self.limits}.items():
            check_quantity(name, quantity)

    def as_container(self) -> dict[str, dict[str, object]]:
        """As in a container; empty if nothing is set."""
        named = {"requests": dict(self.requests), "limits": dict(self.limits)}
        return {name: {k: str(v) for k, v in values.items()} for name, values in named.items() if values}


def check_quantity(name: str, quantity: int | str) -> None:
    """Raises: ValueError naming the quantity."""
    if isinstance(quantity, str) and not re.match(QUANTITY_PATTERN, quantity):
        raise ValueError(f"{name}: {quantity!r} is no quantity; write for example 500m, 2 or 16Gi")

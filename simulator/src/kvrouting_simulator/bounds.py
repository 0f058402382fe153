"""The checks of numbers and names that come from outside: each tells the value and what is right."""

from __future__ import annotations

import math
from collections.abc import Sequence


def at_least(least: float, name: str, value: float) -> None:
    """Raises: ValueError naming the value if it is smaller, infinite or no number."""
    if not least <= value < math.inf:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def positive(name: str, value: float) -> None:
    """Raises: ValueError naming the value if it is 0 or less, infinite or no number."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value}")


def one_of(choices: Sequence[str], name: str, value: str) -> None:
    """Raises: ValueError naming the value and the choices if it is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")

"""Texts with places for numbers: {name} is the number of a claim, so no number is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLACE = re.compile(r"\{([a-z0-9_.-]+)\}")


def filled(text: str, numbers: Mapping[str, str]) -> str:
    """The text with its numbers. Raises: KeyError for a place without one."""
    return _PLACE.sub(lambda found: numbers[found.group(1)], text)


def places(text: str) -> set[str]:
    """The names of the numbers that a text wants."""
    return set(_PLACE.findall(text))

"""Types of command line options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click


class FiniteFloat(click.FloatRange):
    """A number within a range: neither `inf` nor `nan`, which a range alone lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Fails as click's types do, naming the value."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


POSITIVE = FiniteFloat(min=0, min_open=True)
NOT_NEGATIVE = FiniteFloat(min=0)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


def _pairs(separator: str, shape: str) -> Callable[[click.Context, click.Parameter, Sequence[str]], Mapping[str, str]]:
    """A callback that takes repeated options as a mapping. shape: what each is to look like."""

    def read(_context: click.Context, _parameter: click.Parameter, texts: Sequence[str]) -> Mapping[str, str]:
        pairs = {}
        for text in texts:
            name, found, value = text.partition(separator)
            if not found or not name:
                raise click.BadParameter(f"{text!r} is not {shape}")
            pairs[name.strip()] = value.strip()
        return pairs

    return read


named_values = _pairs("=", "NAME=VALUE")
headers = _pairs(":", "'NAME: VALUE'")

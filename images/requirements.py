"""Prints what an extra of pyproject.toml needs, one requirement a line, so that an image's packages are a layer of
their own that a change of the sources leaves alone.

Usage: requirements.py PYPROJECT EXTRA [--without NAME]...
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_OWN_EXTRAS = re.compile(r"kvrouting\[(?P<extras>[^\]]+)\]")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(extras: Mapping[str, Sequence[str]], extra: str) -> Iterator[str]:
    """Of one extra, and of those that it names. Raises: KeyError if there is no such extra."""
    for requirement in extras[extra]:
        own = _OWN_EXTRAS.fullmatch(requirement.strip())
        if own is None:
            yield requirement
            continue
        for inner in own["extras"].split(","):
            yield from requirements(extras, inner.strip())


def name_of(requirement: str) -> str:
    """The package's name."""
    found = _NAME.match(requirement)
    if found is None:
        raise ValueError(f"no package name in {requirement!r}")
    return found[0].lower()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extra")
    parser.add_argument("--without", action="append", default=[], help="a package that the image has no use for")
    options = parser.parse_args()
    extras = tomllib.loads(options.pyproject.read_text())["project"]["optional-dependencies"]
    if options.extra not in extras:
        parser.error(f"there is no extra {options.extra!r}; there are {', '.join(sorted(extras))}")
    for requirement in requirements(extras, options.extra):
        if name_of(requirement) not in options.without:
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main()

"""Worker classes that were measured here, from the files that `kvrouting calibrate` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvrouting_core.class_file import ClassFileError, parse_class
from kvrouting_core.service_time import StepTimes


def read_class_files(paths: Iterable[Path]) -> Mapping[str, StepTimes]:
    """Step times by class; one that is also built in replaces it.

    Raises: ValueError naming the file and what is wrong in it, or two files of one class.
    """
    found: dict[str, StepTimes] = {}
    sources: dict[str, Path] = {}
    for path in paths:
        try:
            measured = parse_class(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text in UTF-8") from None
        except ClassFileError as error:
            raise ValueError(f"{path}: {error}") from None
        if measured.name in found:
            raise ValueError(f"{path} and {sources[measured.name]} both describe class {measured.name!r}: give one")
        found[measured.name], sources[measured.name] = measured.times, path
    return found

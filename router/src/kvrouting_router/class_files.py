"""Worker classes that were measured here, from the files that `kvrouting calibrate` writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvrouting_core.class_file import ClassFileError, parse_class
from kvrouting_core.service_time import WORKER_CLASSES, StepTimes


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


def known_classes(measured: Iterable[str]) -> Collection[str]:
    """Names of the classes that are built in and of those that were measured, each once."""
    return tuple(dict.fromkeys([*WORKER_CLASSES, *measured]))


def unknown_class(name: str, known: Iterable[str]) -> str:
    """What is wrong with the name of a class that is none of the known ones, and what helps."""
    return f"GPU class {name!r} is none of {', '.join(known)}: a measured one needs its --class-file at the router"

"""Packages that a machine without a GPU lacks: any name can be imported from them, nothing can be called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class AbsentThing:
    """A function, class or constant of an absent package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentThing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} is absent: only a stand-in is installed on this machine")


class AbsentModule(types.ModuleType):
    """A module whose every public name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentThing(f"{self.__name__}.{name}")


class AbsentSubmodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one absent package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def stand_in_for(package: str, *, version: str) -> None:
    """Puts an absent module in the place of the package that is being imported. version: what it claims to be."""
    module = AbsentModule(package)
    vars(module)["__version__"] = version
    module.__spec__ = sys.modules[package].__spec__
    module.__path__ = []
    sys.meta_path.append(AbsentSubmodules(package))
    sys.modules[package] = module

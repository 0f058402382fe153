"""Stands in for Triton on a machine without a GPU, where no kernel is ever compiled.

SGLang ships such a stand-in for a platform that has no Triton wheel; this module puts its parts together here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

CLASSES = {
    "triton.runtime.jit": ("JITFunction", "KernelInterface"),
    "triton.compiler": ("CompiledKernel",),
    "triton.compiler.compiler": ("ASTSource",),
    "triton.backends.compiler": ("GPUTarget",),
}
"""Names that must be classes from the start: they are used in `isinstance`."""

ERRORS = {"triton.runtime.autotuner": ("OutOfResources", "PTXASError")}
"""Names that must be exceptions."""

PLAIN = (
    "triton.language.extra.libdevice",
    "triton.runtime.cache",
    "triton.runtime.driver",
    "triton.testing",
    "triton.tools.tensor_descriptor",
)


def _parts() -> Any:
    """SGLang's own stand-ins, loaded from their file: importing the package would import Triton."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        raise ImportError("SGLang is not installed beside this stand-in for Triton")
    file = Path(sglang.submodule_search_locations[0]) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load SGLang's stand-ins from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _replace() -> None:
    """Puts the stand-in in this module's place."""
    parts = _parts()
    triton = parts._make_mock("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv = parts._cdiv
    triton.next_power_of_2 = parts._next_power_of_2
    triton.Config = parts._Config
    sys.meta_path.insert(0, parts._TritonFinder())
    made = {"triton": triton}

    def module(name: str) -> Any:
        if name not in made:
            made[name] = parts._make_mock(name)
            parent, child = name.rsplit(".", 1)
            setattr(module(parent), child, made[name])
        return made[name]

    module("triton.language").constexpr = type(
        "constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)}
    )
    for name in PLAIN:
        module(name)
    for name, classes in CLASSES.items():
        for each in classes:
            setattr(module(name), each, type(each, (parts._StubBase,), {}))
    for name, errors in ERRORS.items():
        for each in errors:
            setattr(module(name), each, type(each, (Exception,), {}))
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        module(name).triton_key = parts._triton_key


_replace()

"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvrouting_sglang import BACKEND, SUPPORTED_SGLANG


class UnsupportedEngineError(RuntimeError):
    """The installed SGLang is not the one that the plug-in knows."""


def register() -> None:
    """Makes `--radix-cache-backend rlt` known to SGLang; the cache itself is loaded when a scheduler asks for it.

    With another version of SGLang the name is registered all the same, so that a server that asks for it ends with the
    reason; one that does not ask is left alone.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(BACKEND, _build if installed_sglang() == SUPPORTED_SGLANG else _refuse)


def installed_sglang() -> str:
    """Version of the installed SGLang."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def _build(context: Any) -> Any:
    from kvrouting_sglang.backend import build_cache

    return build_cache(context)


def _refuse(context: Any) -> Any:  # noqa: ARG001 - the signature is SGLang's
    raise UnsupportedEngineError(
        f"kvrouting extends the cache of SGLang {SUPPORTED_SGLANG}, but SGLang {installed_sglang()} is installed: "
        f"install sglang=={SUPPORTED_SGLANG}, or start without --radix-cache-backend {BACKEND}"
    )

"""RLT and exact cache state for a stock SGLang, through its own extension points.

This module and `plugin` are read by every process of an engine and import nothing but the standard library; the rest
is loaded when a scheduler builds its cache.
"""

SUPPORTED_SGLANG = "0.5.23"
"""The version whose cache classes the plug-in extends. They are no public interface, so no other one is accepted."""

BACKEND = "rlt"
"""Value of SGLang's `--radix-cache-backend` that chooses the plug-in's cache."""

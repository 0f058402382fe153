"""Stands in for SGLang's compiled kernels, which need a GPU."""

from __future__ import annotations

from absent_packages import stand_in_for

stand_in_for("sgl_kernel", version="0.4.4")

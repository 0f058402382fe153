"""Stands in for torchvision, whose wheel does not load beside the CPU build of torch; text models never call it."""

from __future__ import annotations

from absent_packages import stand_in_for

stand_in_for("torchvision", version="0.28.0")

"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A machine that also runs engines, sidecars and routers is slow at times: time is no property of the code here.
_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", **_QUIET)  # type: ignore[arg-type]
# The gate must not fail by a new draw of examples; whoever works on the code draws new ones each time.
settings.register_profile("gate", derandomize=True, **_QUIET)  # type: ignore[arg-type]
settings.load_profile("gate" if os.environ.get("CI") else "default")

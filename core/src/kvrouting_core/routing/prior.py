"""What is believed of a worker before it was observed."""

from __future__ import annotations

from kvrouting_core.routing.events import WorkerProfile
from kvrouting_core.service_time import WORKER_CLASSES, StepTimes


def class_prior(profile: WorkerProfile, default_class: str) -> StepTimes:
    """Step times that it brings, or those of its class, or of the default class if its own is unknown."""
    if profile.times is not None:
        return profile.times
    return WORKER_CLASSES.get(profile.worker_class, WORKER_CLASSES[default_class]).times

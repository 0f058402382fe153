"""What is believed of a worker before it was observed."""

from __future__ import annotations

from kvrouting_core.routing.events import WorkerProfile
from kvrouting_core.service_time import WORKER_CLASSES, StepTimes


def class_prior(profile: WorkerProfile, default_class: str) -> StepTimes:
    """Step times of the worker's class, or of the default class if its own is unknown."""
    return WORKER_CLASSES.get(profile.worker_class, WORKER_CLASSES[default_class]).times

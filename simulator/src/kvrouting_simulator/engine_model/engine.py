"""The engine as a step machine: requests come in, batches are decided, time passes elsewhere, tokens come out."""

from __future__ import annotations

from collections.abc import Callable

from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import StepTimes
from kvrouting_simulator.engine_model.request import EngineRequest

AnswerToken = Callable[[EngineRequest, int], int]
"""Gives token number `index` of the answer to a request; the same for the same arguments."""


class EngineModel:
    """SGLang's scheduler over a radix cache and a time model."""

    def __init__(
        self, *, times: StepTimes, cache: RadixCache, options: SchedulerOptions, answer_token: AnswerToken
    ) -> None:
        self._times = times
        self._cache = cache
        self._options = options
        self._answer_token = answer_token

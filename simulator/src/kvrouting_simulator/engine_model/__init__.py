"""One engine without a GPU: SGLang's scheduler, a radix cache and a time model, on a clock that is passed in."""

from kvrouting_simulator.engine_model.answers import SeededAnswers
from kvrouting_simulator.engine_model.engine import AnswerToken, EngineModel, Step
from kvrouting_simulator.engine_model.request import (
    EngineLoad,
    EngineRequest,
    RequestTooLong,
    StepKind,
    TokenProduced,
)

__all__ = [
    "AnswerToken",
    "EngineLoad",
    "EngineModel",
    "EngineRequest",
    "RequestTooLong",
    "SeededAnswers",
    "Step",
    "StepKind",
    "TokenProduced",
]

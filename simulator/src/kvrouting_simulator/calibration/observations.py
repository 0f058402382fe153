"""What is known of one request on one worker: when it was sent, when its tokens came, how long it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.report import RequestRecord


class DecisionsError(ValueError):
    """A line that is no recorded decision; the message has its number and what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Times are ms on one clock, lengths tokens.

    sound: it completed, its first token's time is known, and its lengths are the engine's own. Of any other one only
    its place in time is used: it kept the worker busy in a way that nobody knows.
    """

    worker: str
    dispatched_ms: float
    first_token_ms: float
    end_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    sound: bool = True

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that the worker computed, at least 1."""
        return max(1, self.prompt_tokens - self.cached_tokens)

    @property
    def token_pairs(self) -> float:
        """Σ over new tokens of the tokens before them: what attention costs."""
        return self.new_tokens * (self.cached_tokens + self.new_tokens / 2)


def read_decisions(lines: Iterable[str], *, name: str) -> list[Observation]:
    """Observations of a router's `--decisions-file`, one for each attempt. name: of the file, for complaints.

    Raises: DecisionsError for a line that is none of it.
    """
    return [_observation(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _observation(line: str, place: str) -> Observation:
    try:
        body = json.loads(line)
        decision, request, outcome = body["decision"], body["request"], body["outcome"]
        return _from_parts(decision, request, outcome)
    except ValueError as error:
        raise DecisionsError(f"{place}: no JSON ({error})") from None
    except (KeyError, TypeError) as error:
        raise DecisionsError(f"{place}: not a line of a router's --decisions-file (missing {error})") from None


def _from_parts(decision: Mapping[str, Any], request: Mapping[str, Any], outcome: Mapping[str, Any]) -> Observation:
    arrived_ms = float(request["arrived_ms"])
    first_ms, end_ms = outcome["first_byte_ms"], arrived_ms + float(outcome["end_ms"])
    cached, output = outcome["cached_tokens"], outcome["output_tokens"]
    # Several answers or prompts in one request share their steps in a way that the line does not tell.
    single = request["sequences"] == 1 and not request["further_prompt_tokens"]
    known = None not in (first_ms, cached, output)
    return Observation(
        worker=str(decision["worker"]),
        dispatched_ms=float(decision["decided_ms"]),
        first_token_ms=end_ms if first_ms is None else arrived_ms + float(first_ms),
        end_ms=end_ms,
        prompt_tokens=int(request["prompt_tokens"]),
        cached_tokens=int(cached or 0),
        output_tokens=int(output or 0),
        sound=bool(outcome["outcome"] == "completed" and request["stream"] and request["exact"] and single and known),
    )


def observed_records(records: Iterable[RequestRecord]) -> Iterator[Observation]:
    """Observations of a run whose router sent each request on at once. One that nobody answered is left out."""
    for record in records:
        if record.worker is None:
            continue
        first_ms = record.first_token_ms
        yield Observation(
            worker=record.worker,
            dispatched_ms=record.arrival_ms,
            first_token_ms=record.end_ms if first_ms is None else first_ms,
            end_ms=record.end_ms,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            sound=record.outcome is Outcome.COMPLETED and first_ms is not None and not record.resubmissions,
        )

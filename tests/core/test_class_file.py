"""The text of a measured worker class: it comes back as it was, and a bad one is refused by what is wrong in it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from kvrouting_core.class_file import ClassFileError, MeasuredClass, parse_class
from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import WorkerProfile
from kvrouting_core.routing.prior import class_prior
from kvrouting_core.service_time import worker_class

TIMES = replace(worker_class("H200").times, prefill_ms_per_token=0.5)
CLASS = MeasuredClass(
    name="T4", times=TIMES, standard_errors={"prefill_ms_per_token": 0.01}, measured={"requests": 300}
)


def test_a_class_comes_back_as_it_was() -> None:
    assert parse_class(CLASS.as_text()) == CLASS
    assert all(len(line) < 100 for line in CLASS.as_text().splitlines())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "a letter"}, "is no worker class"),
        ({"name": ""}, "name is ''"),
        ({"name": "x" * 64}, "1 to 63 printable characters"),
        ({"name": 7}, "name is 7, not a text"),
        ({"speed": 1}, "unknown keys: speed"),
        ({"measured": 3}, "measured is 3, not an object"),
        ({"coefficients": {}}, "coefficients lack prefill_overhead_ms, prefill_floor_ms"),
        ({"coefficients": None}, "coefficients is None, not an object"),
        ({"coefficients": {**asdict(TIMES), "a": 1}}, "coefficients has the unknown 'a'; known: prefill_overhead_ms"),
        ({"coefficients": {**asdict(TIMES), "prefill_floor_ms": -1}}, "prefill_floor_ms must not be negative"),
        ({"coefficients": {**asdict(TIMES), "prefill_ms_per_token": 0}}, "must be positive, got 0"),
        ({"coefficients": {**asdict(TIMES), "prefill_floor_ms": True}}, "is True, not a finite number"),
        ({"coefficients": {**asdict(TIMES), "prefill_floor_ms": float("nan")}}, "is nan, not a finite number"),
        ({"standard_errors": {"prefill_floor_ms": "1"}}, "is '1', not a finite number"),
    ],
)
def test_a_bad_class_is_refused_by_what_is_wrong(change: dict[str, object], complaint: str) -> None:
    text = json.dumps({**json.loads(CLASS.as_text()), **change})
    with pytest.raises(ClassFileError, match=complaint):
        parse_class(text)


@pytest.mark.parametrize("text", ["", "[1]", "{", '"L40"'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ClassFileError, match="is no "):
        parse_class(text)


def test_a_worker_that_brings_its_times_is_expected_to_have_them() -> None:
    profile = WorkerProfile(worker=WorkerId("w0/0"), worker_class="L40", capacity_tokens=1000)
    assert class_prior(profile, "H200") == worker_class("L40").times
    assert class_prior(replace(profile, worker_class="T4"), "H200") == worker_class("H200").times
    assert class_prior(replace(profile, times=TIMES), "H200") == TIMES

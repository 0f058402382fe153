"""What is kept back for answers of running requests."""

from __future__ import annotations

from array import array

import pytest

from kvrouting_simulator.engine_model import EngineRequest
from kvrouting_simulator.engine_model.output_reserve import OutputReserve
from kvrouting_simulator.engine_model.sequence import Sequence


def running(produced: int, output_tokens: int) -> Sequence:
    sequence = Sequence(EngineRequest(request_id="r", prompt=array("I", [1]), output_tokens=output_tokens))
    sequence.answer.extend([0] * produced)
    return sequence


def test_seven_tenths_of_what_may_come_are_kept_back_at_first() -> None:
    assert OutputReserve().tokens([running(20, 120), running(0, 10)]) == pytest.approx(0.7 * 110)


def test_larger_pages_are_kept_back_whole() -> None:
    full, begun = running(1, 4), running(1, 4)
    full.kv_tokens, begun.kv_tokens = 128, 130
    assert OutputReserve().tokens([full, begun], page_size=64) == 64


def test_a_single_answer_counts_with_4096_tokens_at_most() -> None:
    assert OutputReserve().tokens([running(0, 100_000)]) == pytest.approx(0.7 * 4096)


def test_the_share_falls_within_600_decode_steps_and_no_further() -> None:
    reserve = OutputReserve()
    for _ in range(300):
        reserve.decoded()
    assert reserve.share == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(600):
        reserve.decoded()
    assert reserve.share == pytest.approx(0.098)
    reserve.idle()
    assert reserve.share == pytest.approx(0.7)


def test_a_retraction_estimates_the_share_from_the_answers_so_far() -> None:
    reserve = OutputReserve()
    reserve.retracted([running(30, 100), running(10, 99)])
    assert reserve.share == pytest.approx((30 + 10 + 2 * 20) / 200)
    reserve.retracted([running(99, 100)])
    assert reserve.share == 1.0

"""The engine model schedules as SGLang does."""

from __future__ import annotations

import itertools
import random
from array import array

import pytest

from kvrouting_core.eviction import make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import WORKER_CLASSES
from kvrouting_simulator.engine_model import (
    EngineModel,
    EngineRequest,
    RequestTooLong,
    SeededAnswers,
    StepKind,
    TokenProduced,
)
from kvrouting_simulator.engine_model.request import BASE_NAMESPACE

TIMES = WORKER_CLASSES["L40"].times


def engine(
    capacity_tokens: int = 1000,
    *,
    page_size: int = 1,
    eviction: str = "lru",
    options: SchedulerOptions | None = None,
) -> tuple[EngineModel, RadixCache]:
    cache = RadixCache(
        capacity_tokens=capacity_tokens, page_size=page_size, policy=make_policy(eviction, random.Random(1))
    )
    model = EngineModel(
        times=TIMES,
        cache=cache,
        options=options or SchedulerOptions(),
        answer_token=SeededAnswers(seed=1, vocabulary_size=32000),
    )
    return model, cache


def request(request_id: str, prompt: range, output_tokens: int = 1) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt=array("I", prompt), output_tokens=output_tokens)


class Run:
    """Steps a model through time and remembers what it did."""

    def __init__(self, model: EngineModel, now_ms: float = 0.0) -> None:
        self.model = model
        self.now_ms = now_ms
        self.kinds: list[StepKind] = []
        self.prefill_tokens: list[int] = []
        self.sizes: list[int] = []
        self.tokens: list[TokenProduced] = []

    def submit(self, *requests: EngineRequest) -> None:
        for item in requests:
            self.model.submit(item, now_ms=self.now_ms)

    def step(self) -> bool:
        step = self.model.start_step(now_ms=self.now_ms)
        if step is None:
            return False
        self.kinds.append(step.kind)
        self.sizes.append(step.requests)
        self.prefill_tokens.append(step.prefill_tokens)
        self.now_ms += step.duration_ms
        self.tokens += self.model.finish_step(step, now_ms=self.now_ms)
        return True

    def to_idle(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    def finished(self) -> list[str]:
        return [t.request_id for t in self.tokens if t.finished]


def test_one_request_takes_one_prefill_and_a_decode_step_per_further_token() -> None:
    run = Run(engine()[0])
    run.submit(request("a", range(100), output_tokens=4))
    run.to_idle()
    assert run.kinds == [StepKind.PREFILL, StepKind.DECODE, StepKind.DECODE, StepKind.DECODE]
    decodes = sum(TIMES.decode_ms(1, context) for context in (101, 102, 103))
    assert run.now_ms == pytest.approx(TIMES.prefill_ms([(0, 100)]) + decodes)
    assert [(t.index, t.finished) for t in run.tokens] == [(0, False), (1, False), (2, False), (3, True)]


def test_prefill_goes_before_decode_and_is_never_mixed_with_it() -> None:
    run = Run(engine()[0])
    run.submit(request("a", range(100), output_tokens=5))
    run.step()
    run.submit(request("b", range(200, 300)))
    run.step()
    assert run.kinds == [StepKind.PREFILL, StepKind.PREFILL]


def test_a_decode_interval_forces_decode_steps_between_prefills() -> None:
    run = Run(engine(options=SchedulerOptions(prefill_decode_interval=2))[0])
    run.submit(request("a", range(50), output_tokens=9))
    for start in range(1000, 1300, 100):
        run.step()
        run.submit(request(str(start), range(start, start + 50)))
    run.to_idle()
    prefills = [i for i, kind in enumerate(run.kinds) if kind is StepKind.PREFILL]
    assert prefills[0] == 0
    assert all(later - earlier == 3 for earlier, later in itertools.pairwise(prefills))


def test_mixed_chunks_decode_inside_the_prefill_batch() -> None:
    run = Run(engine(options=SchedulerOptions(mixed_chunk=True))[0])
    run.submit(request("a", range(50), output_tokens=3))
    run.step()
    run.submit(request("b", range(100, 160)))
    started = run.now_ms
    run.step()
    assert run.kinds[-1] is StepKind.MIXED
    assert [(t.request_id, t.index) for t in run.tokens[1:]] == [("b", 0), ("a", 1)]
    alone = TIMES.prefill_ms([(0, 60)])
    assert alone <= run.now_ms - started < alone + TIMES.decode_ms(1, 51)


def test_chunks_bound_a_batch_and_a_cut_prompt_goes_on_first() -> None:
    run = Run(engine(5000, options=SchedulerOptions(chunked_prefill_tokens=300))[0])
    run.submit(request("a", range(100)), request("b", range(1000, 1500)), request("c", range(2000, 2100)))
    run.to_idle()
    assert run.prefill_tokens == [300, 300, 100]
    assert run.sizes == [2, 1, 1]
    assert run.finished() == ["a", "b", "c"]


def test_the_cut_prompt_shares_its_last_batch_with_the_next_request() -> None:
    run = Run(engine(5000, options=SchedulerOptions(chunked_prefill_tokens=300))[0])
    run.submit(request("b", range(1000, 1500)), request("c", range(2000, 2100)))
    run.to_idle()
    assert run.prefill_tokens == [300, 300]
    assert run.sizes == [1, 2]


def test_a_batch_takes_no_more_than_the_prefill_limit() -> None:
    options = SchedulerOptions(chunked_prefill_tokens=1000, max_prefill_tokens=250)
    run = Run(engine(5000, options=options)[0])
    run.submit(*(request(str(i), range(1000 * i, 1000 * i + 100)) for i in range(4)))
    run.to_idle()
    assert run.prefill_tokens == [200, 200]


def test_the_running_limit_bounds_the_batch() -> None:
    run = Run(engine(5000, options=SchedulerOptions(max_running_requests=2))[0])
    run.submit(*(request(str(i), range(1000 * i, 1000 * i + 10), output_tokens=3) for i in range(4)))
    run.to_idle()
    assert max(run.sizes) == 2
    assert run.finished() == ["0", "1", "2", "3"]


def test_the_head_of_the_queue_is_not_passed() -> None:
    run = Run(engine(300)[0])
    run.submit(request("holds", range(200), output_tokens=5))
    run.step()
    run.submit(request("large", range(1000, 1200)), request("small", range(2000, 2010)))
    run.step()
    assert run.kinds[-1] is StepKind.DECODE
    assert run.model.load().waiting_requests == 2
    run.to_idle()
    assert run.finished() == ["holds", "large", "small"]


def test_a_prefix_is_matched_at_admission_and_not_at_submission() -> None:
    run = Run(engine()[0])
    run.submit(request("a", range(100)))
    step = run.model.start_step(now_ms=0.0)
    assert step is not None
    run.submit(request("b", range(150)))
    assert run.model.load().waiting_uncached_tokens == 150
    run.model.finish_step(step, now_ms=10.0)
    run.now_ms = 10.0
    run.to_idle()
    assert run.tokens[-1].cached_tokens == 100


def test_a_fully_cached_prompt_computes_its_last_token() -> None:
    run = Run(engine()[0])
    run.submit(request("a", range(100)))
    run.to_idle()
    run.submit(request("b", range(100)))
    run.to_idle()
    assert run.prefill_tokens == [100, 1]
    assert run.tokens[-1].cached_tokens == 99


def test_a_fully_cached_prompt_computes_its_last_page() -> None:
    run = Run(engine(page_size=16)[0])
    run.submit(request("a", range(96)))
    run.to_idle()
    run.submit(request("b", range(96)))
    run.to_idle()
    assert run.prefill_tokens == [96, 16]


def test_requests_of_one_batch_with_the_same_prefix_both_compute_it_and_one_copy_stays() -> None:
    model, cache = engine()
    run = Run(model)
    run.submit(request("a", range(100)), request("b", range(100)))
    run.to_idle()
    assert run.prefill_tokens == [200]
    assert cache.used_tokens == 100
    assert cache.free_tokens == 900


def test_the_answer_is_cached_but_for_its_last_token() -> None:
    model, cache = engine()
    run = Run(model)
    run.submit(request("a", range(100), output_tokens=4))
    run.to_idle()
    answer = array("I", [t.token for t in run.tokens])
    assert cache.match(array("I", range(100)) + answer, BASE_NAMESPACE).tokens == 103


def test_decode_that_runs_out_of_room_retracts_and_loses_nobody() -> None:
    model, cache = engine(230)
    run = Run(model)
    run.submit(request("a", range(60), output_tokens=60))
    run.step()
    run.submit(request("b", range(100, 160), output_tokens=60))
    run.to_idle()
    assert model.load().total_retractions > 0
    assert sorted(run.finished()) == ["a", "b"]
    for name in "ab":
        assert [t.index for t in run.tokens if t.request_id == name] == list(range(60))
    assert cache.locked_tokens == cache.reserved_tokens == 0


def test_the_request_with_the_shortest_answer_is_retracted() -> None:
    model, _ = engine(230)
    run = Run(model)
    run.submit(request("old", range(60), output_tokens=60))
    for _ in range(3):
        run.step()
    run.submit(request("new", range(100, 160), output_tokens=60))
    while model.load().total_retractions == 0:
        assert run.step()
    assert model.load().waiting_requests == 1
    assert len([t for t in run.tokens if t.request_id == "old"]) > len([t for t in run.tokens if t.request_id == "new"])


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    model, _ = engine(100)
    with pytest.raises(RequestTooLong, match=r"needs 102 tokens .* 100 tokens"):
        model.submit(request("a", range(100), output_tokens=2), now_ms=0.0)
    with pytest.raises(ValueError, match="needs 102"):
        model.submit(request("a", range(100), output_tokens=2), now_ms=0.0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_longest_request_that_fits_is_served(page_size: int) -> None:
    run = Run(engine(160, page_size=page_size)[0])
    run.submit(request("other", range(5000, 5100), output_tokens=8), request("a", range(100), output_tokens=61))
    run.to_idle()
    assert sorted(run.finished()) == ["a", "other"]


def test_an_id_that_is_being_served_is_refused() -> None:
    model, _ = engine()
    model.submit(request("a", range(10)), now_ms=0.0)
    with pytest.raises(ValueError, match="a is already being served"):
        model.submit(request("a", range(10)), now_ms=0.0)


def test_abort_of_a_waiting_request_leaves_nothing() -> None:
    model, cache = engine()
    model.submit(request("a", range(10)), now_ms=0.0)
    assert model.abort("a")
    assert not model.abort("a")
    assert model.start_step(now_ms=0.0) is None
    assert model.load().waiting_uncached_tokens == 0
    assert cache.used_tokens == 0


def test_abort_inside_a_step_gives_no_token_and_keeps_what_was_computed() -> None:
    model, cache = engine()
    model.submit(request("a", range(10), output_tokens=5), now_ms=0.0)
    step = model.start_step(now_ms=0.0)
    assert step is not None
    assert model.abort("a")
    assert model.finish_step(step, now_ms=30.0) == []
    assert model.idle
    assert cache.used_tokens == 10
    assert cache.locked_tokens == cache.reserved_tokens == 0


def test_abort_of_a_partly_prefilled_prompt_frees_its_slots() -> None:
    model, cache = engine(options=SchedulerOptions(chunked_prefill_tokens=40))
    run = Run(model)
    run.submit(request("a", range(100)))
    run.step()
    assert model.abort("a")
    assert model.idle
    assert cache.used_tokens == 40
    assert cache.locked_tokens == cache.reserved_tokens == 0


def test_flush_empties_the_cache_only_when_nothing_runs_or_waits() -> None:
    model, cache = engine()
    run = Run(model)
    run.submit(request("a", range(10)))
    assert not model.flush()
    run.to_idle()
    assert cache.used_tokens == 10
    assert model.flush()
    assert cache.used_tokens == 0


def test_the_load_counts_what_it_says() -> None:
    model, _ = engine(options=SchedulerOptions(chunked_prefill_tokens=60))
    run = Run(model)
    run.submit(request("a", range(50), output_tokens=2), request("b", range(100, 150)), request("c", range(200, 230)))
    assert model.load().waiting_uncached_tokens == 130
    run.step()
    load = model.load()
    assert (load.running_requests, load.waiting_requests) == (2, 1)
    assert load.waiting_uncached_tokens == 40 + 30
    assert load.used_tokens == 60
    assert load.total_prefill_uncached_tokens == 60
    assert load.total_prefill_busy_us == round(TIMES.prefill_ms([(0, 50), (0, 10)]) * 1000)
    run.to_idle()
    load = model.load()
    assert (load.running_requests, load.waiting_requests, load.waiting_uncached_tokens, load.used_tokens) == (0,) * 4
    assert load.total_prefill_uncached_tokens == 130
    assert (load.total_prompt_tokens, load.total_cached_tokens, load.total_output_tokens) == (130, 0, 4)


def test_time_that_goes_backwards_and_steps_that_overlap_are_refused() -> None:
    model, _ = engine()
    model.submit(request("a", range(10)), now_ms=5.0)
    with pytest.raises(ValueError, match=r"now_ms 4.0 is before 5.0"):
        model.start_step(now_ms=4.0)
    step = model.start_step(now_ms=5.0)
    assert step is not None
    with pytest.raises(RuntimeError, match="under way"):
        model.start_step(now_ms=6.0)
    model.finish_step(step, now_ms=30.0)
    with pytest.raises(ValueError, match="not under way"):
        model.finish_step(step, now_ms=31.0)


def test_a_chunk_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="chunked_prefill_tokens 32 is less than a page of 64"):
        engine(page_size=64, options=SchedulerOptions(chunked_prefill_tokens=32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": array("I"), "output_tokens": 1}, "prompt of a is empty"),
        ({"prompt": array("I", [1]), "output_tokens": 0}, "output_tokens of a must be at least 1, got 0"),
    ],
)
def test_nonsense_requests_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineRequest(request_id="a", **arguments)  # type: ignore[arg-type]

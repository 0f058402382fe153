"""Whatever is submitted and aborted: capacity holds, locks balance, nobody is lost."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.eviction import make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import WORKER_CLASSES
from kvrouting_simulator.engine_model import EngineModel, EngineRequest, SeededAnswers, Step, TokenProduced

CAPACITY_TOKENS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """actions: (kind, number): submit a request made from the number, abort one, or take steps."""

    page_size: int
    eviction: str
    options: SchedulerOptions
    actions: list[tuple[str, int]]


scripts = st.builds(
    Script,
    page_size=st.sampled_from([1, 3, 8]),
    eviction=st.sampled_from(["lru", "rlt", "slru", "lfu", "random"]),
    options=st.builds(
        SchedulerOptions,
        max_running_requests=st.sampled_from([1, 3, 2048]),
        chunked_prefill_tokens=st.sampled_from([8, 20, 8192]),
        max_prefill_tokens=st.sampled_from([30, 16384]),
        prefill_decode_interval=st.sampled_from([0, 2]),
        mixed_chunk=st.booleans(),
    ),
    actions=st.lists(
        st.tuples(st.sampled_from(["submit", "submit", "abort", "start", "finish"]), st.integers(0, 9999)),
        max_size=60,
    ),
)


def prompt_of(number: int) -> array[int]:
    """From a small family with many shared prefixes."""
    rng = random.Random(number)
    group, shared = rng.randrange(3), rng.randrange(1, 40)
    own = [rng.randrange(2) for _ in range(rng.randrange(12))]
    return array("I", [group * 100 + i for i in range(shared)] + [1000 + t for t in own])


class Machine:
    """Runs a script, and checks the invariants after every action."""

    def __init__(self, script: Script) -> None:
        self.cache = RadixCache(
            capacity_tokens=CAPACITY_TOKENS,
            page_size=script.page_size,
            policy=make_policy(script.eviction, random.Random(5)),
        )
        self.model = EngineModel(
            times=WORKER_CLASSES["L40"].times,
            cache=self.cache,
            options=script.options,
            answer_token=SeededAnswers(seed=0, vocabulary_size=2),
        )
        self.now_ms = 0.0
        self.step: Step | None = None
        self.submitted: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.tokens: list[TokenProduced] = []
        self.log: list[object] = []
        for kind, number in script.actions:
            self.act(kind, number)
        self.to_idle()

    def act(self, kind: str, number: int) -> None:
        if kind == "submit":
            prompt = prompt_of(number)
            request = EngineRequest(request_id=f"r{len(self.submitted)}", prompt=prompt, output_tokens=1 + number % 30)
            self.submitted[request.request_id] = request
            self.model.submit(request, now_ms=self.now_ms)
        elif kind == "abort" and self.submitted:
            victim = f"r{number % len(self.submitted)}"
            if self.model.abort(victim):
                self.aborted.add(victim)
        elif kind == "start" and self.step is None:
            self.step = self.model.start_step(now_ms=self.now_ms)
        elif kind == "finish":
            self.finish()
        self.check()

    def finish(self) -> None:
        if self.step is None:
            return
        self.now_ms += self.step.duration_ms
        self.log.append((self.step.kind, self.step.requests, self.step.prefill_tokens, self.now_ms))
        produced = self.model.finish_step(self.step, now_ms=self.now_ms)
        assert not {t.request_id for t in produced} & self.aborted
        self.tokens += produced
        self.step = None

    def to_idle(self) -> None:
        for _ in range(5000):
            self.finish()
            self.check()
            self.step = self.model.start_step(now_ms=self.now_ms)
            if self.step is None:
                return
        raise AssertionError("the engine does not come to rest")

    def check(self) -> None:
        cache, load = self.cache, self.model.load()
        assert cache.used_tokens + cache.reserved_tokens <= CAPACITY_TOKENS
        assert cache.free_tokens >= 0
        assert 0 <= load.used_tokens <= CAPACITY_TOKENS
        assert load.waiting_uncached_tokens >= 0
        assert load.running_requests >= 0


@settings(max_examples=300, deadline=None)
@given(scripts)
def test_every_request_ends_once_and_the_cache_is_left_whole(script: Script) -> None:
    machine = Machine(script)
    finished = [t.request_id for t in machine.tokens if t.finished]
    assert sorted([*finished, *machine.aborted]) == sorted(machine.submitted)
    assert machine.model.idle
    assert machine.cache.locked_tokens == machine.cache.reserved_tokens == 0
    load = machine.model.load()
    assert (load.running_requests, load.waiting_requests, load.waiting_uncached_tokens) == (0, 0, 0)
    for name in finished:
        own = [t for t in machine.tokens if t.request_id == name]
        assert [t.index for t in own] == list(range(machine.submitted[name].output_tokens))
        assert all(t.prompt_tokens == len(machine.submitted[name].prompt) for t in own)
        assert all(0 <= t.cached_tokens < t.prompt_tokens for t in own)


@settings(max_examples=100, deadline=None)
@given(scripts)
def test_cached_and_computed_tokens_make_the_prompts(script: Script) -> None:
    actions = [(kind, number) for kind, number in script.actions if kind != "abort"]
    machine = Machine(
        Script(page_size=script.page_size, eviction=script.eviction, options=script.options, actions=actions)
    )
    load = machine.model.load()
    prompts = sum(len(r.prompt) for r in machine.submitted.values())
    assert load.total_prompt_tokens == prompts
    assert load.total_cached_tokens == sum(t.cached_tokens for t in machine.tokens if t.index == 0)
    computed = load.total_prefill_uncached_tokens
    if load.total_retractions:
        assert load.total_cached_tokens + computed > prompts
    else:
        assert load.total_cached_tokens + computed == prompts


@settings(max_examples=50, deadline=None)
@given(scripts)
def test_same_script_same_steps_and_tokens(script: Script) -> None:
    first, second = Machine(script), Machine(script)
    assert first.log == second.log
    assert first.tokens == second.tokens

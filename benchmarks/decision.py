"""Time of one routing decision, against the bare argmin that any cost-based router needs.

A decision is one `Arrival` of an 8k prompt: match in the real index, estimate, choose, reserve, credit, report every
candidate. One process, one interleaved run: each round asks every policy and the bare argmin once, in turn, about the
same prompt; a pool at work around it (requests in flight, first tokens, completions, load reports) is driven untimed.

A policy that keeps requests answers elsewhere than at the arrival, so the second table is all of its CPU time, every
event of a pool at work included, for each request: `lbgr` with a full line before it, the same with one worker that has
room and that no request wants, and its immediate form.

The third table is all that comes before a request is sent: tokenizing a text of which nine tenths were seen before,
hashing its blocks, and the decision.
`python -m benchmarks.decision [--quick]`
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._texts import Writer, write_tokenizer
from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.decision import Dispatch
from kvrouting_core.routing.events import (
    Arrival,
    Ended,
    Event,
    FirstToken,
    LoadReport,
    Outcome,
    PrefixArrived,
    RoutingRequest,
    WorkerJoined,
    WorkerProfile,
)
from kvrouting_core.routing.policy import AdmissionLimits, Policy
from kvrouting_core.routing.registry import POLICY_NAMES, build_policy
from kvrouting_tokenization import load_tokenizer

BLOCK_TOKENS, PROMPT_TOKENS = 64, 8192
GROUPS = 64
IN_FLIGHT_PER_WORKER = 4
WHOLE_WORKERS = 64
SEEN_SHARE = 0.9
BASELINE = "bare argmin"
WAITING = 200
VARIANTS: dict[str, dict[str, object]] = {
    "lbgr": {"binding": "immediate"},
    "lbgr, residual on": {"binding": "immediate", "residual": "on"},
    "lbgr, as the paper": {
        "binding": "immediate",
        "residual": "off",
        "price": 0,
        "queue": "decayed",
        "decode_price": 0,
    },
}


@dataclass(slots=True)
class Subject:
    """One policy with a pool at work."""

    policy: Policy
    running: deque[str] = field(default_factory=deque)
    times_us: list[float] = field(default_factory=list)
    busy_us: int = 0
    tokens: int = 0


def pool_index(workers: list[WorkerId], rng: random.Random) -> tuple[PrefixIndex, list[list[int]]]:
    """An index in which each worker holds a random depth of a quarter of the groups' prompts."""
    index = PrefixIndex()
    prompts = [[rng.getrandbits(64) for _ in range(PROMPT_TOKENS // BLOCK_TOKENS)] for _ in range(GROUPS)]
    for worker in workers:
        for prompt in rng.sample(prompts, GROUPS // 4):
            index.add(worker, prompt[: rng.randint(1, len(prompt))])
    return index, prompts


def hot_index(workers: list[WorkerId], rng: random.Random) -> tuple[PrefixIndex, list[list[int]]]:
    """The same prompts, held whole by all but one worker, so that nothing which waits is to go to that one."""
    _, prompts = pool_index(workers, rng)
    index = PrefixIndex()
    for worker in workers[:-1]:
        for prompt in prompts:
            index.add(worker, prompt)
    return index, prompts


def bare_argmin(index: PrefixIndex, workers: list[WorkerId], blocks: list[int]) -> WorkerId:
    """Match, multiply, compare: the least that a router by cost can do."""
    matched = index.match(blocks)
    best, best_cost = workers[0], float("inf")
    for worker in workers:
        cost = 0.112 * (PROMPT_TOKENS - BLOCK_TOKENS * matched.get(worker, 0))
        if cost < best_cost:
            best, best_cost = worker, cost
    return best


def ask(subject: Subject, workers: list[WorkerId], blocks: list[int], number: int, now_ms: float) -> None:
    """One timed decision, and the untimed life of the pool around it."""
    request = RoutingRequest(request_id=str(number), blocks=blocks, prompt_tokens=PROMPT_TOKENS)
    arrival = Arrival(request=request)
    began = time.perf_counter()
    (action,) = subject.policy.handle(arrival, now_ms=now_ms)
    subject.times_us.append((time.perf_counter() - began) * 1e6)
    if not isinstance(action, Dispatch):
        raise TypeError(f"the pool refused: {action}")
    subject.running.append(request.request_id)
    if number % 2:
        subject.policy.handle(FirstToken(request_id=request.request_id), now_ms=now_ms + 1)
    if len(subject.running) > IN_FLIGHT_PER_WORKER * len(workers):
        oldest = subject.running.popleft()
        subject.policy.handle(PrefixArrived(request_id=oldest), now_ms=now_ms + 2)
        ended = Ended(request_id=oldest, outcome=Outcome.COMPLETED, output_tokens=4)
        subject.policy.handle(ended, now_ms=now_ms + 2)
    report(subject, workers[number % len(workers)], now_ms)


def report(subject: Subject, worker: WorkerId, now_ms: float) -> None:
    """The engine of one worker speaks."""
    subject.busy_us += 800_000
    subject.tokens += 7000
    load = LoadReport(
        worker=worker,
        reported_ms=now_ms,
        running_requests=3,
        waiting_requests=2,
        used_tokens=100_000,
        waiting_uncached_tokens=4000,
        total_prefill_uncached_tokens=subject.tokens,
        total_prefill_busy_us=subject.busy_us,
    )
    subject.policy.handle(load, now_ms=now_ms + 3)


def measure(worker_count: int, rounds: int) -> dict[str, list[float]]:
    """µs of each decision, by policy and for the baseline."""
    rng = random.Random(worker_count)
    workers = [WorkerId(f"pod-{i}/0") for i in range(worker_count)]
    index, prompts = pool_index(workers, rng)
    subjects = {name: Subject(build(name, index, workers)) for name in subject_names()}
    baseline_us: list[float] = []
    warm_up = IN_FLIGHT_PER_WORKER * worker_count + 64
    for number in range(warm_up + rounds):
        blocks = rng.choice(prompts)
        began = time.perf_counter()
        bare_argmin(index, workers, blocks)
        baseline_us.append((time.perf_counter() - began) * 1e6)
        for subject in subjects.values():
            ask(subject, workers, blocks, number, number * 20.0)
    return {BASELINE: baseline_us[warm_up:], **{name: s.times_us[warm_up:] for name, s in subjects.items()}}


@dataclass
class Line:
    """A pool at work before which requests wait, and the CPU time of a run, the pool's own little included."""

    policy: Policy
    prompts: list[list[int]]
    rng: random.Random
    spent_s: float = 0.0
    ended: int = 0
    waiting: list[int] = field(default_factory=list)
    due: list[tuple[float, int, Event]] = field(default_factory=list)
    free_ms: dict[WorkerId, float] = field(default_factory=dict)
    planned: int = 0

    def plan(self, at_ms: float, event: Event) -> None:
        """An event that the policy will be told."""
        self.planned += 1
        heapq.heappush(self.due, (at_ms, self.planned, event))

    def tell(self, event: Event, now_ms: float) -> None:
        """What is sent is prefilled after what its worker has."""
        for action in self.policy.handle(event, now_ms=now_ms):
            if not isinstance(action, Dispatch):
                raise TypeError(f"the pool refused: {action}")
            work_ms = 6 + 0.112 * action.decision.chosen.uncached_tokens
            done_ms = max(now_ms, self.free_ms.get(action.worker, 0.0)) + work_ms
            self.free_ms[action.worker] = done_ms
            self.plan(done_ms, FirstToken(request_id=action.request_id))

    def arrive(self, number: int, now_ms: float) -> None:
        """One more request: a prompt of its own after a random part of one that others have, too."""
        shared = self.rng.choice(self.prompts)
        shared = shared[: self.rng.randint(1, len(shared))]
        own = [self.rng.getrandbits(64) for _ in range(self.rng.randint(1, 32))]
        blocks = shared + own
        request = RoutingRequest(request_id=str(number), blocks=blocks, prompt_tokens=len(blocks) * BLOCK_TOKENS + 1)
        self.tell(Arrival(request=request), now_ms)

    def run(self, workers: list[WorkerId], requests: int, in_system: int) -> None:
        """As many requests as end are replaced."""
        now_ms, arrived, began_s = 0.0, 0, time.thread_time()
        self.plan(0.0, _report(workers[0], 0.0))
        while self.ended < requests:
            while arrived - self.ended < in_system:
                self.arrive(arrived, now_ms)
                arrived += 1
            now_ms, _, event = heapq.heappop(self.due)
            self.tell(event, now_ms)
            self.waiting.append(self.policy.waiting)
            if isinstance(event, FirstToken):
                self.tell(PrefixArrived(request_id=event.request_id), now_ms)
                ended = Ended(request_id=event.request_id, outcome=Outcome.COMPLETED, output_tokens=4)
                self.plan(now_ms + 75, ended)
            elif isinstance(event, Ended):
                self.ended += 1
            elif isinstance(event, LoadReport):
                following = workers[(workers.index(event.worker) + 1) % len(workers)]
                self.plan(now_ms + 1000 / len(workers), _report(following, now_ms))
        self.spent_s = time.thread_time() - began_s


def _report(worker: WorkerId, now_ms: float) -> LoadReport:
    return LoadReport(
        worker=worker, reported_ms=now_ms, running_requests=0, waiting_requests=0, used_tokens=0,
        waiting_uncached_tokens=0, total_prefill_uncached_tokens=0, total_prefill_busy_us=0,
    )  # fmt: skip


def measure_line(requests: int) -> None:
    """Prints CPU time of all events for each request, late binding and immediate."""
    workers = [WorkerId(f"pod-{i}/0") for i in range(WHOLE_WORKERS)]
    spent = {}
    cases = {
        "immediate": ("immediate", pool_index(workers, random.Random(7))),
        "late": ("late", pool_index(workers, random.Random(7))),
        "late, one idle": ("late", hot_index(workers, random.Random(7))),
    }
    for name, (binding, (index, prompts)) in cases.items():
        pending = Line(build("lbgr", index, workers, {"binding": binding}), prompts, random.Random(8))
        pending.run(workers, requests, WAITING + 2 * WHOLE_WORKERS)
        spent[name] = pending.spent_s / requests * 1e6
        waiting = statistics.mean(pending.waiting)
        ratio = spent[name] / spent["immediate"]
        print(f"{WHOLE_WORKERS:>7}  lbgr, {name:<14} {spent[name]:>8.0f} {waiting:>8.0f} {ratio:>15.2f}")


def subject_names() -> list[str]:
    """The variants of `lbgr`, then the other policies."""
    return [*VARIANTS, *(name for name in POLICY_NAMES if name != "lbgr")]


def build(
    name: str, index: PrefixIndex, workers: list[WorkerId], parameters: Mapping[str, object] | None = None
) -> Policy:
    """A policy whose workers have joined. parameters: None for those of the variant of that name."""
    kind, of_variant = ("lbgr", VARIANTS[name]) if name in VARIANTS else (name, {})
    policy = build_policy(
        kind,
        of_variant if parameters is None else parameters,
        cache=index,
        block_size_tokens=BLOCK_TOKENS,
        rng=random.Random(1),
        limits=AdmissionLimits(max_expected_wait_ms=1e9),
    )
    for worker in workers:
        profile = WorkerProfile(worker=worker, worker_class="L40", capacity_tokens=197_000)
        policy.handle(WorkerJoined(profile=profile), now_ms=0.0)
    return policy


def measure_whole(rounds: int) -> dict[str, list[float]]:
    """µs of each step of a request with a text of about 8k tokens, and of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(str(write_tokenizer(Path(folder))))
    hasher, namespace = ChainHasher(b"b" * 32, BLOCK_TOKENS), Namespace(model="m")
    writer = Writer(5)
    per_token = 30_000 / len(tokenizer.encode_prompt(writer.text(30_000)))
    characters = round(PROMPT_TOKENS * per_token)
    documents = [writer.text(round(characters * SEEN_SHARE)) for _ in range(GROUPS)]
    workers = [WorkerId(f"pod-{i}/0") for i in range(WHOLE_WORKERS)]
    index, rng = PrefixIndex(), random.Random(2)
    for document in documents:
        blocks = hasher.hash_blocks(namespace, tokenizer.encode_prompt(document)).tolist()
        for worker in rng.sample(workers, WHOLE_WORKERS // 4):
            index.add(worker, blocks[: rng.randint(1, len(blocks))])
    subject = Subject(build("lbgr", index, workers))
    times: dict[str, list[float]] = {BASELINE: [], "tokenize": [], "hash": [], "lbgr": [], "all three": []}
    warm_up = IN_FLIGHT_PER_WORKER * WHOLE_WORKERS
    for number in range(warm_up + rounds):
        text = rng.choice(documents) + " " + writer.text(round(characters * (1 - SEEN_SHARE)))
        began = time.perf_counter()
        tokens = tokenizer.encode_prompt(text)
        tokenized = time.perf_counter()
        blocks = hasher.hash_blocks(namespace, tokens).tolist()
        hashed = time.perf_counter()
        bare_argmin(index, workers, blocks)
        times[BASELINE].append((time.perf_counter() - hashed) * 1e6)
        ask(subject, workers, blocks, number, number * 20.0)
        steps = [(tokenized - began) * 1e6, (hashed - tokenized) * 1e6, subject.times_us[-1]]
        for name, value in zip(("tokenize", "hash", "lbgr", "all three"), (*steps, sum(steps)), strict=True):
            times[name].append(value)
    return {name: values[warm_up:] for name, values in times.items()}


def show(title: str, times: dict[str, list[float]]) -> None:
    """One line for each thing that was timed."""
    unit = statistics.median(times[BASELINE])
    for name, values in times.items():
        p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
        print(f"{title:>7}  {name:<20} {p50:>8.0f} {p99:>8.0f} {p50 / unit:>15.2f}")


def main() -> None:
    """Prints p50, p99 and the ratio of medians to the baseline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 200 if parser.parse_args().quick else 2000
    print(f"{'workers':>7}  {'policy':<20} {'p50 µs':>8} {'p99 µs':>8} {'to ' + BASELINE:>15}")
    for worker_count in (4, 16, 64, 256):
        show(str(worker_count), measure(worker_count, rounds))
    print(f"\n{'workers':>7}  {'policy':<20} {'µs':>8} {'waiting':>8} {'to immediate':>15}")
    measure_line(rounds)
    print(f"\nfrom text to dispatch, {PROMPT_TOKENS} tokens, {SEEN_SHARE:.0%} seen before")
    show(str(WHOLE_WORKERS), measure_whole(rounds))


if __name__ == "__main__":
    main()

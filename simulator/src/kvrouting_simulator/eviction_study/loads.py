"""Sequences of prompts that tell eviction policies apart; made from a seed, or read from a trace."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kvrouting_simulator.workloads import tokens
from kvrouting_simulator.workloads.gsp import Gsp, Order
from kvrouting_simulator.workloads.long_documents import LongDocuments
from kvrouting_simulator.workloads.traces import AgentSessions, MooncakeTrace

Prompts = Sequence["array[int]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """capacities_tokens: of the cache, ascending. prompts: for a seed and the folder of traces. trace: the file that it
    needs there; None: none.
    """

    about: str
    capacities_tokens: tuple[int, ...]
    prompts: Callable[[int, Path], Prompts]
    trace: str | None = None


def _gsp(order: Order) -> Callable[[int, Path], Prompts]:
    def prompts(seed: int, traces: Path) -> Prompts:  # noqa: ARG001 - the load needs no trace
        return [item.tokens for item in Gsp(order=order).workload(seed=seed).items]

    return prompts


def _documents(seed: int, traces: Path) -> Prompts:  # noqa: ARG001
    return [item.tokens for item in LongDocuments(questions_per_document=16).workload(seed=seed).items]


def _mooncake(seed: int, traces: Path) -> Prompts:
    """The whole trace: about an hour of the service."""
    return [item.tokens for item in MooncakeTrace(path=traces / MOONCAKE).workload(seed=seed).items]


def _agents(seed: int, traces: Path) -> Prompts:
    workload = AgentSessions(path=traces / AGENTS).workload(seed=seed)
    return [item.tokens for item in workload.items]


def _popular(count: int) -> list[float]:
    """Zipf's law with exponent 1."""
    weights = [1 / rank for rank in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


def _zipf_with_drift(seed: int, traces: Path) -> Prompts:  # noqa: ARG001
    """600 prefixes of 1,024 tokens, whose ranks move on by one place every 16 requests; each prompt adds 512 tokens."""
    rng = np.random.default_rng([seed, 11])
    prefixes = [tokens.drawn(rng, 1024) for _ in range(600)]
    ranks = rng.choice(600, size=4000, p=_popular(600))
    return [prefixes[(rank + number // 16) % 600] + tokens.drawn(rng, 512) for number, rank in enumerate(ranks)]


def _scan_pollution(seed: int, traces: Path) -> Prompts:  # noqa: ARG001
    """80 prefixes of 1,024 tokens in popular use; after every 400 requests, 100 prompts of 4,096 tokens asked once."""
    rng = np.random.default_rng([seed, 12])
    prefixes = [tokens.drawn(rng, 1024) for _ in range(80)]
    prompts = []
    for _ in range(8):
        picks = rng.choice(80, size=400, p=_popular(80))
        prompts += [prefixes[pick] + tokens.drawn(rng, 256) for pick in picks]
        prompts += [tokens.drawn(rng, 4096) for _ in range(100)]
    return prompts


def _stack_distances(seed: int, traces: Path) -> Prompts:  # noqa: ARG001
    """Two of three prompts repeat the one that lies d distinct prompts back, d log-normal around 60; each of 1,024
    tokens.
    """
    rng = np.random.default_rng([seed, 13])
    stack: list[array[int]] = []
    prompts = []
    for _ in range(4000):
        distance = int(rng.lognormal(np.log(60), 1.2))
        repeats = rng.random() < 2 / 3 and distance < len(stack)
        prompt = stack.pop(-1 - distance) if repeats else tokens.drawn(rng, 1024)
        stack.append(prompt)
        prompts.append(prompt)
    return prompts


def _chat(seed: int, traces: Path) -> Prompts:  # noqa: ARG001
    """40 conversations at a time behind one of 4 system prompts of 1,024 tokens. Turns of 128 to 768 tokens, answers
    included; a conversation ends after a turn with probability .15, and a new one takes its place.
    """
    rng = np.random.default_rng([seed, 14])
    systems = [tokens.drawn(rng, 1024) for _ in range(4)]
    open_chats = [systems[number % 4] for number in range(40)]
    prompts = []
    for _ in range(4000):
        pool_index = int(rng.integers(40))
        history = open_chats[pool_index] + tokens.drawn(rng, int(rng.integers(128, 769)))
        prompts.append(history)
        open_chats[pool_index] = systems[int(rng.integers(4))] if rng.random() < 0.15 else history
    return prompts


MOONCAKE = "mooncake_conversation_trace.jsonl.xz"
AGENTS = "agent_sessions_block16.jsonl.xz"

LOADS: Mapping[str, Load] = MappingProxyType(
    {
        "gsp-random": Load(
            about="GSP, random order",
            capacities_tokens=(57_000, 131_000, 197_000, 250_000),
            prompts=_gsp("random"),
        ),
        "gsp-round-robin": Load(
            about="GSP, round-robin order", capacities_tokens=(197_000, 300_000), prompts=_gsp("round_robin")
        ),
        "zipf-drift": Load(about="Zipf with drift", capacities_tokens=(120_000, 400_000), prompts=_zipf_with_drift),
        "scan": Load(about="popular prefixes and scans", capacities_tokens=(60_000, 120_000), prompts=_scan_pollution),
        "stack-distance": Load(
            about="log-normal stack distances", capacities_tokens=(50_000, 100_000, 200_000), prompts=_stack_distances
        ),
        "chat": Load(about="chat", capacities_tokens=(60_000, 120_000), prompts=_chat),
        "documents": Load(
            about="questions on long documents", capacities_tokens=(120_000, 300_000), prompts=_documents
        ),
        "agents": Load(
            about="recorded agent sessions", capacities_tokens=(200_000, 1_000_000), prompts=_agents, trace=AGENTS
        ),
        "mooncake": Load(
            about="Mooncake conversation",
            capacities_tokens=(1_000_000, 4_000_000, 10_000_000),
            prompts=_mooncake,
            trace=MOONCAKE,
        ),
    }
)

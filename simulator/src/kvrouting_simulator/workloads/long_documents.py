"""Questions on long documents: each prompt is a document and a short question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from kvrouting_simulator.bounds import at_least, one_of
from kvrouting_simulator.workloads import tokens
from kvrouting_simulator.workloads.arrivals import Arrivals, PoissonArrivals
from kvrouting_simulator.workloads.client import ScheduledClient
from kvrouting_simulator.workloads.work_item import Client, WorkItem, Workload

Order = Literal["random", "round_robin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LongDocuments:
    """Document d has lengths_tokens[d mod len] tokens and is asked about questions_per_document times on average.

    order: `random` draws a document for each question; `round_robin` goes round all documents.
    A question has shortest_question_tokens..longest_question_tokens tokens, uniformly.
    """

    documents: int = 140
    lengths_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    questions_per_document: int = 8
    shortest_question_tokens: int = 20
    longest_question_tokens: int = 40
    output_tokens: int = 4
    order: Order = "random"
    arrivals: Arrivals = field(default_factory=PoissonArrivals)
    requests: int | None = None
    content_seed: int = 1
    vocabulary_size: int = tokens.VOCABULARY_SIZE

    def __post_init__(self) -> None:
        for name in (
            "documents",
            "questions_per_document",
            "shortest_question_tokens",
            "output_tokens",
            "vocabulary_size",
        ):
            at_least(1, name, getattr(self, name))
        at_least(self.shortest_question_tokens, "longest_question_tokens", self.longest_question_tokens)
        if self.requests is not None:
            at_least(1, "requests", self.requests)
        if not self.lengths_tokens or min(self.lengths_tokens) < 1:
            raise ValueError(f"lengths_tokens must be lengths of at least 1 token, got {self.lengths_tokens}")
        one_of(get_args(Order), "order", self.order)

    def workload(self, *, seed: int) -> Workload:
        """The requests of one run."""
        order_rng = np.random.default_rng([seed, 0])
        picks = self._picks(order_rng)[: self.requests]
        times = self.arrivals.times_ms(len(picks), np.random.default_rng([seed, 1]))
        rng = np.random.default_rng([self.content_seed, 2])
        documents = [
            tokens.drawn(rng, self.lengths_tokens[d % len(self.lengths_tokens)], self.vocabulary_size)
            for d in range(self.documents)
        ]
        asked = [0] * self.documents
        items = []
        for document, time_ms in zip(picks, times, strict=True):
            length = int(order_rng.integers(self.shortest_question_tokens, self.longest_question_tokens, endpoint=True))
            items.append(
                WorkItem(
                    request_id=f"doc-{document}-{asked[document]}",
                    arrival_ms=float(time_ms),
                    tokens=documents[document] + tokens.drawn(order_rng, length, self.vocabulary_size),
                    output_tokens=self.output_tokens,
                    session=f"doc-{document}",
                )
            )
            asked[document] += 1
        return Workload(name=f"long_documents/{self.order}", items=items)

    def client(self, *, seed: int) -> Client:
        """Who sends them."""
        return ScheduledClient(self.workload(seed=seed))

    def _picks(self, rng: np.random.Generator) -> list[int]:
        total = self.documents * self.questions_per_document
        if self.order == "round_robin":
            return [i % self.documents for i in range(total)]
        return [int(document) for document in rng.integers(0, self.documents, total)]

"""Random histories of a scheduler: requests that share prefixes, overlap in time, grow, and come in namespaces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.engine.real.caches import Namespace, NoRoomError, Running, admit, load

NAMESPACES = (Namespace(), Namespace(cache_salt="a"), Namespace(cache_salt="b"))


class History:
    """One step at a time: admit, load, or drop a request. At most `overlapping` hold locks at once."""

    def __init__(self, cache: Any, *, seed: int, prompt_pages: int = 24, overlapping: int = 3) -> None:
        self._cache = cache
        self._rng = random.Random(seed)
        self._prompt_tokens = prompt_pages * cache.page_size
        self._overlapping = overlapping
        self.running: list[Running] = []
        self._prompts: list[list[int]] = [self._tokens(self._prompt_tokens) for _ in range(12)]

    def steps(self, count: int) -> Iterator[int]:
        for number in range(count):
            self._step()
            yield number

    def finish(self) -> None:
        """Lets go of all that is held."""
        while self.running:
            self._cache.unlock(self.running.pop().lock)

    def _step(self) -> None:
        rng = self._rng
        if self.running and (len(self.running) == self._overlapping or rng.random() < 0.4):
            running = self.running.pop(rng.randrange(len(self.running)))
            if rng.random() < 0.1:
                self._cache.unlock(running.lock)
                return
            try:
                load(self._cache, running)
            except NoRoomError:
                return
            return
        self.running.append(admit(self._cache, self._prompt(), rng.choices(NAMESPACES, (8, 1, 1))[0]))

    def _prompt(self) -> list[int]:
        rng = self._rng
        prompt = rng.choice(self._prompts)
        prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        if rng.random() < 0.5:
            prompt = prompt + self._tokens(rng.randrange(1, self._prompt_tokens // 2 + 2))
        if rng.random() < 0.3:
            self._prompts[rng.randrange(len(self._prompts))] = prompt[: self._prompt_tokens * 2]
        return prompt

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(50_000) for _ in range(count)]

"""What the engine answers: token ids that follow from the request alone, so that every run says the same."""

from __future__ import annotations

import zlib

from kvrouting_simulator.engine_model.request import EngineRequest

_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: consecutive indexes land far apart


class SeededAnswers:
    """Token `index` of the answer to a request, spread over the vocabulary by its id, the index and the seed.

    Raises: ValueError if vocabulary_size is not positive.
    """

    def __init__(self, *, seed: int, vocabulary_size: int) -> None:
        if vocabulary_size < 1:
            raise ValueError(f"vocabulary_size must be at least 1, got {vocabulary_size}")
        self._start = zlib.crc32(str(seed).encode())
        self._vocabulary_size = vocabulary_size

    def __call__(self, request: EngineRequest, index: int) -> int:
        """0..vocabulary_size − 1."""
        word = zlib.crc32(request.request_id.encode(), self._start) + index * _GOLDEN & 0xFFFFFFFF
        return word * self._vocabulary_size >> 32

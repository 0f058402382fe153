"""Is the mirror what the engine says it holds? Count and digest of the pages, compared at equal sequence numbers."""

from __future__ import annotations

from kvrouting_sidecar.wire_events import EngineState

_REMEMBERED_POSITIONS = 8192


class PositionHistory:
    """Count and digest of the mirror at its latest positions, so that an answer from a moment ago can be judged."""

    def __init__(self, *, remembered: int = _REMEMBERED_POSITIONS) -> None:
        if remembered < 1:
            raise ValueError(f"remembered {remembered} must be at least 1")
        self._remembered = remembered
        self._positions: dict[int, tuple[int, int]] = {}
        self._newest = -1

    def note(self, sequence: int, pages: int, digest: int) -> None:
        """The mirror after all batches below `sequence`."""
        self._positions[sequence] = (pages, digest)
        self._newest = sequence
        if len(self._positions) > self._remembered:
            del self._positions[next(iter(self._positions))]

    def at(self, sequence: int) -> tuple[int, int] | None:
        """Count and digest at that position; None: not there yet, or forgotten."""
        return self._positions.get(sequence)

    def is_past(self, sequence: int) -> bool:
        """The mirror has gone beyond that position."""
        return self._newest > sequence

    def forget(self) -> None:
        """Another mirror begins."""
        self._positions.clear()
        self._newest = -1


class Verification:
    """The engine's latest answer that awaits its comparison, and what the comparisons gave."""

    def __init__(self) -> None:
        self._expected: EngineState | None = None
        self._expected_at_next: int | None = None
        self._latest: bool | None = None
        self.matches = 0
        self.mismatches = 0

    @property
    def held(self) -> bool:
        """The latest comparison was made with this mirror, and held."""
        return self._latest is True

    @property
    def due_at(self) -> int | None:
        """The position of the answer that waits for the mirror; None: none waits."""
        return self._expected.sequence if self._expected else None

    def expect(self, state: EngineState, next_sequence: int | None) -> bool:
        """Compare with this answer when the mirror has its position.

        Returns: False if an earlier answer still waits and the mirror has not moved since: what leads to its position
        was lost on the way.
        """
        stuck = self._expected is not None and self._expected_at_next == next_sequence
        behind = next_sequence is None or next_sequence < state.sequence
        self._expected, self._expected_at_next = state, next_sequence
        return not (stuck and behind)

    def compare(self, history: PositionHistory) -> str | None:
        """Compare, if the position is known. Returns: the difference in words; None: none, or not comparable yet."""
        expected = self._expected
        if expected is None:
            return None
        found = history.at(expected.sequence)
        if found is None:
            if history.is_past(expected.sequence):
                self._expected = None
            return None
        self._expected = None
        self._latest = found == (expected.pages, expected.digest)
        if self._latest:
            self.matches += 1
            return None
        self.mismatches += 1
        return (
            f"at batch {expected.sequence} the engine holds {expected.pages} pages with digest {expected.digest:#x}, "
            f"the mirror {found[0]} with {found[1]:#x}"
        )

    def lost(self) -> None:
        """The engine answers no more."""
        self._expected = self._latest = None

    def forget(self) -> None:
        """Another mirror begins."""
        self.lost()

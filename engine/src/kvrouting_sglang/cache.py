"""SGLang's cache on a tree whose victims a policy of ours chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class PolicyRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """Evicts what is missing, at once, instead of leaf after leaf.

    SGLang asks for everything evictable when an allocation falls short, and stops after the first sufficient leaf. A
    policy that cuts tails is asked for the real shortfall.
    """

    def _evict_components(
        self,
        request_by_type: dict[Any, int],
        tracker: dict[Any, int],
        available_size_targets: dict[Any, tuple[Any, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> None:
        if allocation_reclaim_satisfied is not None and allocation_reclaim_satisfied():
            return
        target = (available_size_targets or {}).get(BASE_COMPONENT_TYPE)
        wanted = request_by_type[BASE_COMPONENT_TYPE]
        while wanted > 0:
            freed = self._evict_tokens(wanted)
            tracker[BASE_COMPONENT_TYPE] += freed
            if not freed or target is None:
                return
            # An allocator may hold back some of what it was given, so the target decides and not the count.
            wanted = target[1] - self._component_available_size(target[0])

    def _evict_tokens(self, tokens: int) -> int:
        """Frees at least so many tokens, or all that are evictable. Returns the tokens freed."""
        slots = self.tree_core.evict_pages(-(-tokens // self.page_size))
        if not slots:
            return 0
        freed = torch.cat(slots) if len(slots) > 1 else slots[0]
        self._free_values({BASE_COMPONENT_TYPE: [freed]}, {})
        return len(freed)

"""SGLang's radix tree with a policy of ours that chooses what is evicted.

The tree stays SGLang's: nodes, locks, sizes, hashes, events. What differs is who chooses the victims, and that a leaf
can lose only its tail. Everything that another thread may read changes between two counts of `version`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from kvrouting_core.eviction import EvictionPolicy, NodeRecord, PathAccess, TreeSite
from kvrouting_sglang.event_ledger import EventLedger
from kvrouting_sglang.leaf_set import PolicyLeaves
from kvrouting_sglang.node_store import NodeStore


@dataclass
class PolicyInitParams(CacheInitParams):  # type: ignore[misc]
    """SGLang's parameters of a cache, and the policy that this one is to use."""

    policy: EvictionPolicy[Any] = field(kw_only=True)


class PolicyTreeNode(UnifiedTreeNode):  # type: ignore[misc]
    """record: what the policy keeps about the node; None for the root.

    born: id of the node that was inserted with the pages that this one now holds. Splits move pages into new nodes, so
    it may be less than the node's own id.
    """

    def __init__(self, tree_components: Any, priority: int, born: int | None) -> None:
        super().__init__(tree_components, priority)
        self.record: NodeRecord | None = None
        self.born: int = self.id if born is None else born


class PolicyTreeCore(UnifiedTreeCore):  # type: ignore[misc]
    """Overrides where nodes appear, split and vanish, and where an insert ends."""

    def __init__(self, params: PolicyInitParams, components: Any) -> None:
        self.policy = params.policy
        self.live_nodes = NodeStore()
        self.version = 0
        self.evicted_tokens = 0
        self._born_of_split: int | None = None
        self.policy.attached(
            TreeSite(
                capacity_pages=max(1, params.token_to_kv_pool_allocator.size // params.page_size),
                page_tokens=params.page_size,
                is_locked=_is_locked,
            )
        )
        super().__init__(params, components)
        recorder = vars(self)["kv_events"]
        self.kv_events = EventLedger(
            enabled=recorder.enabled,
            page_size=recorder.page_size,
            dynamo_format=recorder.dynamo_format,
            lora_names=recorder.lora_names,
        )

    @property
    def is_bound(self) -> bool:
        """Whether the policy hears of every leaf and so chooses the victims."""
        return isinstance(self.evictable_device_leaves, PolicyLeaves)

    def holds(self, node: PolicyTreeNode) -> bool:
        """Whether the node is in the tree."""
        return node.id in self._node_arena

    def reset(self) -> None:
        """Empties the tree; the policy keeps its coins and its phase."""
        self.version += 1
        root = vars(self).get("root_node")
        if root is not None and root.children:
            self.policy.clear()
        self.live_nodes.clear()
        super().reset()
        self.evictable_device_leaves = PolicyLeaves(self.policy, self.page_size)
        self.version += 1

    def evict_pages(self, pages: int) -> list[Any]:
        """Cuts so many pages, or as many as are evictable, from the tails of leaves that the policy chooses.

        Returns the freed slots, one tensor per leaf, which the caller gives back to the allocator.
        """
        slots: list[Any] = []
        hashes: list[int] = []
        freed = 0
        for record, count in self.policy.choose(pages, self._expose_parent):
            freed += count * self.page_size
            self.version += 1
            slots.append(self._cut(record, count, hashes))
            self.version += 1
        self.component_evictable_size_[BASE_COMPONENT_TYPE] -= freed
        self.evicted_tokens += freed
        self.kv_events.record_tails(hashes)
        return slots

    def _expose_parent(self, record: NodeRecord) -> NodeRecord | None:
        """Takes a wholly chosen leaf off its parent; the parent's record, if that is now an unlocked leaf."""
        node = record.owner
        parent = node.parent
        leaves: PolicyLeaves = self.evictable_device_leaves
        leaves.discard_chosen(node)
        self._remove_leaf_from_parent(node)
        if not self._is_device_leaf(parent):
            return None
        leaves.add_exposed(parent)
        exposed: NodeRecord = parent.record
        return exposed

    def _cut(self, record: NodeRecord, pages: int, hashes: list[int]) -> Any:
        """Removes a leaf's last pages, or all of it once it is off its parent; its published hashes go to `hashes`."""
        node = record.owner
        data = node.component_data[BASE_COMPONENT_TYPE]
        kept = record.pages - pages
        ledger: EventLedger = self.kv_events
        if ledger.enabled:
            hashes.extend(ledger.published_hashes(node, ledger.hash_values(node)[kept:]))  # type: ignore[index]
        if not kept:
            record.owner = None
            return data.value
        for values in (node.hash_value, node.event_hash_value):
            if values is not None:
                del values[kept:]
        kept_tokens = kept * self.page_size
        freed = data.value[kept_tokens:]
        data.value = data.value[:kept_tokens]
        key = node.key
        # The ids are shared with whoever made the key, so they are capped and not cut.
        node.key = RadixKey(key.token_ids, key.extra_key, limit=kept_tokens, cache_salt=key.cache_salt)
        self.policy.trimmed(record, pages)
        return freed

    # ---- SGLang's methods, extended ------------------------------------------------------------------------------

    def _new_node(self, priority: int = 0) -> PolicyTreeNode:
        node = PolicyTreeNode(self.component_types, priority, self._born_of_split)
        self._register_node(node)
        return node

    def _register_node(self, node: PolicyTreeNode) -> None:
        super()._register_node(node)
        self.live_nodes.put(node)

    def _unregister_node(self, node: PolicyTreeNode) -> None:
        super()._unregister_node(node)
        self.live_nodes.take(node)

    def _add_new_node(self, *args: Any, **kwargs: Any) -> PolicyTreeNode:
        self.version += 1
        node: PolicyTreeNode = super()._add_new_node(*args, **kwargs)
        self.version += 1
        return node

    def _remove_leaf_from_parent(self, node: PolicyTreeNode) -> None:
        self.version += 1
        super()._remove_leaf_from_parent(node)
        self.version += 1

    def _split_node(self, key: RadixKey, child: PolicyTreeNode, split_len: int) -> tuple[PolicyTreeNode, Any]:
        self.version += 1
        self._born_of_split = child.born
        upper, action = super()._split_node(key, child, split_len)
        self._born_of_split = None
        upper.record = self.policy.split(child.record, upper, split_len // self.page_size)
        self.version += 1
        return upper, action

    def _insert_tail_step(self, state: Any) -> None:
        super()._insert_tail_step(state)
        self._accessed(state)

    def _accessed(self, state: Any) -> None:
        """Tells the policy of the path that was inserted.

        SGLang has no hook for the admission of a request: it looks up and locks requests that it then leaves waiting.
        A request's first insert shows it: what was cached before (`prev_prefix_len`) has been hit. Nothing that the
        request hit could be evicted in between, because it was locked.
        """
        params, page_size = state.params, self.page_size
        records = _records_to(state.target_node)
        path = self._path(params.key)
        if params.inserted_len == 0:
            hit_pages = min(params.prev_prefix_len // page_size, path.pages)
            self.policy.admitted(replace(path, hit_pages=hit_pages, records=_within(records, hit_pages)))
        found = state.total_prefix_length // page_size
        self.policy.inserted(replace(path, hit_pages=found, records=records))

    def _path(self, key: RadixKey) -> PathAccess[NodeRecord]:
        """An access to the whole pages of a key, before it is known what of them was cached."""
        pages = len(key) // self.page_size
        tokens = _packed(key.token_ids[: pages * self.page_size])
        namespace = (key.extra_key, key.cache_salt)
        return PathAccess(namespace=namespace, tokens=tokens, pages=pages, hit_pages=0, records=())


def _is_locked(node: PolicyTreeNode) -> bool:
    """Whether a request holds the node."""
    return bool(node.component_data[BASE_COMPONENT_TYPE].lock_ref > 0)


def _records_to(node: PolicyTreeNode) -> list[NodeRecord]:
    """The records from the root's child down to a node."""
    records: list[NodeRecord] = []
    upwards: Any = node
    while upwards.parent is not None:
        records.append(upwards.record)
        upwards = upwards.parent
    records.reverse()
    return records


def _within(records: Sequence[NodeRecord], pages: int) -> list[NodeRecord]:
    """The leading records that lie within so many pages."""
    within = []
    for record in records:
        pages -= record.pages
        if pages < 0:
            break
        within.append(record)
    return within


def _packed(token_ids: array[int]) -> bytes:
    """Token ids, held by SGLang in 64 bits each, as unsigned 32-bit integers in machine order."""
    halves = memoryview(token_ids).cast("B").cast("I")
    return halves[::2].tobytes() if sys.byteorder == "little" else halves[1::2].tobytes()

"""Which headers pass a proxy, and in which direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict, CIMultiDictProxy

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

# RFC 9110 section 7.6.1: meant for one connection only.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
# Ours to set: the length of what we send, the peer's name, the engine's rank. Without a coding usage stays readable.
_NOT_TO_ENGINE = _HOP_BY_HOP | frozenset(
    ("host", "content-length", "expect", "accept-encoding", "x-data-parallel-rank")
)
_NOT_TO_CLIENT = _HOP_BY_HOP | frozenset(("content-length",))
RANK_HEADER = "X-Data-Parallel-Rank"
DECISION_HEADER = "x-kvrouting-decision"


def _named_by_connection(headers: Mapping[str, str]) -> frozenset[str]:
    listed = headers.get("Connection", "")
    return frozenset(name.strip().lower() for name in listed.split(",")) if listed else frozenset()


def _without(headers: Headers, names: Iterable[str]) -> CIMultiDict[str]:
    passed = CIMultiDict(headers)
    for name in names:
        passed.popall(name, None)
    return passed


def to_engine(headers: CIMultiDictProxy[str], *, drop_authorization: bool) -> CIMultiDict[str]:
    """A client's headers as an engine gets them. drop_authorization: the key was meant for this router."""
    dropped = _NOT_TO_ENGINE | _named_by_connection(headers)
    passed = _without(headers, dropped | {"authorization"} if drop_authorization else dropped)
    passed["Accept-Encoding"] = "identity"
    return passed


def to_client(headers: Headers) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    return _without(headers, _NOT_TO_CLIENT | _named_by_connection(headers))

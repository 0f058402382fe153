"""What each policy can be told, and how plain values from a file or a command line become it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from kvrouting_core.service_time import worker_class

Binding = Literal["late", "immediate"]
QueueForm = Literal["drained", "decayed"]
PriceQueue = Literal["least", "mean", "own"]
Price = float | Literal["backlog"]

_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LbgrParameters:
    """`lbgr`: choose argmin of E + price, E = s + P + r. Each difference from the paper is a switch.

    binding: "late": requests wait in the router until their worker has room, and all of them are planned again at each
        event; "immediate": each arrival is answered at once.
    release_ahead_ms: H of late binding: own prefill work that a worker may have ahead, at least 1.
    decode_limit: θ of late binding: a worker gets so many requests that its decodes take about 1/θ of the time of
        their prefills; 0: no limit.
    limit_rises: the limit by decodes rises with √(requests that wait for each worker): a long queue is worth more
        prefill. Off: it is the same at any load.
    follow_scheduler: H and θ follow what the engine says of its scheduler (see `release`); off: as given.
    size_precedence: κ of late binding: a request is due at its arrival + κ·prefill, so short work goes first, and only
        those that arrive within κ·prefill of a request can pass it. 0: first come, first served.
    decode_share: how much of a request's own decode time counts in the choice of late binding.
    queue: P. "drained": own work without a first token, drained as the worker really works and corrected by the
        engine's reports; "decayed": the paper's geometric decay.
    price: μ, how much a millisecond of new prefill counts for those who come later. "backlog": rises with the
        pool's backlog; a number: constant; 0 is the paper.
    price_floor: least μ of "backlog": capacity is not free even in an idle pool, because a second copy of a prefix
        displaces another prefix from a cache, and a burst of siblings would spread over all workers: n of them, of L
        tokens of which each has l of its own, stay on two while the floor is above about n·l/2L.
    price_queue: q of "backlog" in late binding: of the "least" loaded worker, because idle capacity is free; the
        "mean" of all, which gathers shared prefixes on too few; or each worker's "own", which scatters them.
    price_at_pool_speed: μ is applied to the work at the pool's mean speed; off: to the time on the worker itself.
    decode_price: what a prefill is held to cost each running decode of its worker, per millisecond.
    residual: the learned correction r of the prediction. Off: it improves the prediction's error and not the choice
        (generated shared prefixes, 12 req/s on four L40: P50 .69 s with it, .63 s without; P95 4.4 and 3.8 s).
    learned_speed: learn each worker's speed from its engine's counters; off: the class prior.
    in_flight_credit: prefixes that are being prefilled count as held by their worker.
    exploration_share: of the requests, at most this share is sent to a worker that has served fewer than
    exploration_requests while the others have served more, if that costs at most
    exploration_extra_ms more than the best choice.
    decay_factor, decay_interval_ms: of the "decayed" queue, ρ and Δt.
    initial_output_tokens: mean length of an answer before any was seen.
    default_worker_class: the prior of a worker whose class is unknown.
    """

    binding: Binding = "late"
    release_ahead_ms: float = 100.0
    decode_limit: float = 4.0
    limit_rises: bool = True
    follow_scheduler: bool = True
    size_precedence: float = 2.0
    decode_share: float = 0.3
    queue: QueueForm = "drained"
    price: Price = "backlog"
    price_floor: float = 0.3
    price_queue: PriceQueue = "least"
    price_at_pool_speed: bool = True
    decode_price: float = 0.1
    residual: bool = False
    learned_speed: bool = True
    in_flight_credit: bool = True
    exploration_share: float = 0.02
    exploration_requests: int = 16
    exploration_extra_ms: float = 500.0
    decay_factor: float = 31 / 32
    decay_interval_ms: float = 20.0
    initial_output_tokens: float = 64.0
    default_worker_class: str = "L40"

    def __post_init__(self) -> None:
        if self.binding not in ("late", "immediate"):
            raise ValueError(f"binding is {self.binding!r}; known: 'late', 'immediate'")
        _at_least("release_ahead_ms", self.release_ahead_ms, 1)  # with none ahead no worker ever has room
        for name in ("decode_limit", "size_precedence", "decode_share"):
            _at_least(name, getattr(self, name), 0)
        if self.queue not in ("drained", "decayed"):
            raise ValueError(f"queue is {self.queue!r}; known: 'drained', 'decayed'")
        if isinstance(self.price, str):
            if self.price != "backlog":
                raise ValueError(f"price is {self.price!r}; give 'backlog' or a number of at least 0")
        else:
            _at_least("price", self.price, 0)
        if self.price_queue not in ("least", "mean", "own"):
            raise ValueError(f"price_queue is {self.price_queue!r}; known: 'least', 'mean', 'own'")
        _at_least("price_floor", self.price_floor, 0)
        _at_least("decode_price", self.decode_price, 0)
        if not 0 <= self.exploration_share <= 0.5:
            raise ValueError(f"exploration_share is {self.exploration_share}; give 0 (off) to 0.5")
        _at_least("exploration_requests", self.exploration_requests, 0)
        _at_least("exploration_extra_ms", self.exploration_extra_ms, 0)
        _check_decay(self.decay_factor, self.decay_interval_ms)
        _at_least("initial_output_tokens", self.initial_output_tokens, 1)
        worker_class(self.default_worker_class)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperParameters:
    """`lbgr-paper`: LBGR as the paper's text defines it.

    cached_ms_per_token: α_cached; α_miss is the prior of the worker's class.
    learning_rate: of the online step on θ, normalised by the features' length.
    decay_factor, decay_interval_ms: ρ and Δt; the text names neither, the values are those of its code.
    initial_output_tokens, default_worker_class: as for `lbgr`.
    """

    cached_ms_per_token: float = 0.0
    learning_rate: float = 0.05
    decay_factor: float = 31 / 32
    decay_interval_ms: float = 20.0
    initial_output_tokens: float = 64.0
    default_worker_class: str = "L40"

    def __post_init__(self) -> None:
        _at_least("cached_ms_per_token", self.cached_ms_per_token, 0)
        if not 0 <= self.learning_rate < 2:
            raise ValueError(f"learning_rate is {self.learning_rate}; a normalised step is stable in 0 to 2")
        _check_decay(self.decay_factor, self.decay_interval_ms)
        _at_least("initial_output_tokens", self.initial_output_tokens, 1)
        worker_class(self.default_worker_class)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheAwareParameters:
    """`cache_aware`: SGLang's router, on an exact index and in tokens.

    match_threshold: matched share of the prompt above which the longest prefix decides.
    imbalance_requests, imbalance_ratio: when the most loaded worker has more than `imbalance_requests` in flight
        above the least loaded one and more than `imbalance_ratio` times as many, load alone decides.
    """

    match_threshold: float = 0.5
    imbalance_requests: int = 32
    imbalance_ratio: float = 1.0001

    def __post_init__(self) -> None:
        if not 0 <= self.match_threshold <= 1:
            raise ValueError(f"match_threshold is {self.match_threshold}; a share is 0 to 1")
        _at_least("imbalance_requests", self.imbalance_requests, 0)
        _at_least("imbalance_ratio", self.imbalance_ratio, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoParameters:
    """`least_load`, `round_robin` and `random` have nothing to set."""


Parameters = TypeVar("Parameters", LbgrParameters, PaperParameters, CacheAwareParameters, NoParameters)


def parse_parameters(kind: type[Parameters], policy: str, given: Mapping[str, object]) -> Parameters:
    """Builds a policy's parameters from plain values: numbers, booleans or their spelling as text.

    Raises: ValueError for an unknown name, naming the known ones, and for a value of another type or range.
    """
    known = {field.name: field.type for field in fields(kind)}
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(f"policy {policy!r} has no parameter {name!r}; known: {names}")
    values = {name: _parsed(name, str(known[name]), value) for name, value in given.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"policy {policy!r}: {error}") from None


def _parsed(name: str, annotation: str, value: object) -> Any:
    if annotation == "bool":
        return _switch(name, value)
    if annotation == "int":
        return _whole(name, value)
    if annotation == "float" or (annotation == "Price" and value != "backlog"):
        return _number(name, value)
    if not isinstance(value, str):
        raise ValueError(f"parameter {name} is {value!r}; give a text")  # noqa: TRY004 - values come from users
    return value


def _switch(name: str, value: object) -> bool:
    text = str(value).lower()
    if text in _ON:
        return True
    if text in _OFF:
        return False
    raise ValueError(f"parameter {name} is {value!r}; give 'on' or 'off'")


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise ValueError(f"parameter {name} is {value!r}; give a number")


def _whole(name: str, value: object) -> int:
    number = _number(name, value)
    if not number.is_integer():
        raise ValueError(f"parameter {name} is {value!r}; give a whole number")
    return int(number)


def _at_least(name: str, value: float, least: float) -> None:
    # Written so that nan is refused, too.
    if not least <= value < float("inf"):
        raise ValueError(f"{name} is {value}; give a number of at least {least}")


def _check_decay(factor: float, interval_ms: float) -> None:
    if not 0 < factor < 1:
        raise ValueError(f"decay_factor is {factor}; give a number between 0 and 1")
    if not 0 < interval_ms < float("inf"):
        raise ValueError(f"decay_interval_ms is {interval_ms}; give a positive number")

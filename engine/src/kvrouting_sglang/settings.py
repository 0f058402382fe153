"""What the plug-in can be told, by environment variables: SGLang's command line is not extensible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrouting_core.eviction import DEFAULT_POLICY, POLICIES

PREFIX = "KVROUTING_ENGINE_"
DEFAULT_STATE_ENDPOINT = "tcp://127.0.0.1:5579"
OFF = "off"

_NAMES = ("POLICY", "SEED", "STATE_ENDPOINT")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """policy: one of kvrouting_core.eviction.POLICIES. seed: of the policy's coins; None: the engine's own
    `--random-seed`. state_endpoint: tcp:// address of the state socket of data-parallel rank 0, rank r has port + r;
    None: no socket.
    """

    policy: str = DEFAULT_POLICY
    seed: int | None = None
    state_endpoint: str | None = DEFAULT_STATE_ENDPOINT

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"{PREFIX}POLICY is {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if self.state_endpoint is not None:
            split_endpoint(self.state_endpoint)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EngineSettings:
        """Raises: ValueError for an unknown variable with the prefix or a bad value, naming it and what is accepted."""
        given = {name[len(PREFIX) :]: text for name, text in environment.items() if name.startswith(PREFIX)}
        for name in given:
            if name not in _NAMES:
                known = ", ".join(PREFIX + known_name for known_name in _NAMES)
                raise ValueError(f"unknown setting {PREFIX}{name}: the plug-in knows {known}")
        endpoint = given.get("STATE_ENDPOINT", DEFAULT_STATE_ENDPOINT)
        return cls(
            policy=given.get("POLICY", DEFAULT_POLICY),
            seed=_whole_number(given["SEED"]) if "SEED" in given else None,
            state_endpoint=None if endpoint == OFF else endpoint,
        )


def endpoint_of_rank(base: str, dp_rank: int) -> str:
    """The state endpoint of a data-parallel rank. Raises: ValueError if its port is beyond 65535."""
    address, port = split_endpoint(base)
    if port + dp_rank > 65535:
        raise ValueError(f"{PREFIX}STATE_ENDPOINT {base!r} leaves no port for data-parallel rank {dp_rank}")
    return f"{address}:{port + dp_rank}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """(`tcp://host`, port). Raises: ValueError, naming the value and the accepted form."""
    address, _, port = endpoint.rpartition(":")
    host = address[len("tcp://") :] if address.startswith("tcp://") else ""
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{PREFIX}STATE_ENDPOINT is {endpoint!r}: give tcp://HOST:PORT or {OFF!r}")
    return address, int(port)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{PREFIX}SEED is {text!r}: give a whole number") from None

"""What the operator's process can be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouting_operator.pool import Images


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSettings:
    """namespaces: empty means all. resync_s: between two looks at everything. parallel: pools at a time.
    api_limit_s, router_limit_s: time-outs of one request. silence_limit_s: how long the watch may owe what a list has
    shown. watch_s: a watch is asked for anew after so long. probe_port: 0 is any free one. kubeconfig: None means the
    pod's ServiceAccount. apply_crd: whether the CRD is brought up to this version at the start.
    """

    images: Images
    namespaces: tuple[str, ...] = ()
    resync_s: float = 30.0
    parallel: int = 4
    api_limit_s: float = 15.0
    router_limit_s: float = 2.0
    silence_limit_s: float = 60.0
    watch_s: int = 120
    probe_host: str = "0.0.0.0"  # noqa: S104 - the kubelet asks from outside the pod
    probe_port: int = 8081
    kubeconfig: str | None = None
    apply_crd: bool = True

    def __post_init__(self) -> None:
        for name in ("resync_s", "api_limit_s", "router_limit_s", "silence_limit_s", "watch_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.parallel < 1:
            raise ValueError(f"parallel must be at least 1, got {self.parallel}")
        if not 0 <= self.probe_port <= 65535:
            raise ValueError(f"probe_port must be between 0 and 65535, got {self.probe_port}")

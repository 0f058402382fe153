"""The routers of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvrouting_operator.spec.part import Argument, Image, ObjectName, Part, Rule, owned_flags_rule, refuse_owned_flags
from kvrouting_operator.spec.references import SecretKey
from kvrouting_operator.spec.workload import PullPolicy, Resources

PolicyName = Literal["lbgr", "lbgr-paper", "cache_aware", "least_load", "round_robin", "random"]

_AS_IT_IS = "the pool's Services and probes need it as it is"
ROUTER_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--model": "set model.servedName",
        "--pool": "it is the pool's name",
        "--block-size": "set sidecar.blockSize",
        "--hash-key-file": "the operator makes the key",
        "--join-token-file": "the operator makes the token",
        "--worker": "workers join by their sidecars",
        "--http-host": _AS_IT_IS,
        "--http-port": _AS_IT_IS,
        "--grpc-host": _AS_IT_IS,
        "--grpc-port": _AS_IT_IS,
        "--grpc-tls-cert-file": "set router.tlsSecretName",
        "--grpc-tls-key-file": "set router.tlsSecretName",
        "--api-keys-file": "set router.apiKeysSecret",
        "--tokenizer": "set model.tokenizer",
        "--tokenizer-revision": "set model.tokenizer",
        "--policy": "set router.policy.name",
        "--policy-parameter": "set router.policy.parameters",
        "--shutdown-s": "set drain.timeoutSeconds",
        "--tracing": "set tracing",
        "--no-tracing": "set tracing",
    }
)


class Policy(Part, frozen=True, kw_only=True):
    """How the router chooses a worker."""

    name: Annotated[
        PolicyName,
        Meta(description="lbgr: learning-based greedy routing; the others are for comparison."),
    ] = "lbgr"
    parameters: Annotated[
        dict[str, Annotated[str, Meta(max_length=253)]],
        Meta(
            description="Parameters of the policy by name; one that it does not know stops the router, with the "
            "reason in RouterAvailable.",
            max_length=32,
        ),
    ] = msgspec.field(default_factory=dict)


class RouterService(Part, frozen=True, kw_only=True):
    """The Service that clients talk to."""

    RULES = (
        Rule(
            cel="!has(self.nodePort) || self.type != 'ClusterIP'",
            message="service.nodePort needs type NodePort or LoadBalancer",
        ),
    )

    type: Annotated[Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Service.")] = (
        "ClusterIP"
    )
    port: Annotated[int, Meta(description="Its port.", ge=1, le=65535)] = 80
    node_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None, Meta(description="Port on the nodes; absent: the cluster chooses.")
    ] = None
    annotations: Annotated[
        dict[str, Annotated[str, Meta(max_length=4096)]],
        Meta(description="Annotations of the Service, for load balancers.", max_length=32),
    ] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.node_port is not None and self.type == "ClusterIP":
            raise ValueError(f"service.nodePort {self.node_port} needs type NodePort or LoadBalancer")


class RouterSpec(Part, frozen=True, kw_only=True):
    """The routers of the pool. Each knows all workers; they share nothing."""

    RULES = (owned_flags_rule("args", ROUTER_FLAGS),)

    replicas: Annotated[int, Meta(description="Number of routers.", ge=1, le=20)] = 1
    image: Annotated[Image | None, Meta(description="Default: the operator's.")] = None
    image_pull_policy: Annotated[PullPolicy | None, Meta(description="Default: the cluster's own.")] = None
    policy: Annotated[Policy, Meta(description="How the router chooses a worker.")] = msgspec.field(
        default_factory=Policy
    )
    args: Annotated[
        tuple[Argument, ...],
        Meta(
            description="Further options of kvrouting router, in the form --option=value or --option. Those that "
            "the pool sets itself are refused by name.",
            max_length=64,
        ),
    ] = ()
    service: Annotated[RouterService, Meta(description="The Service that clients talk to.")] = msgspec.field(
        default_factory=RouterService
    )
    resources: Annotated[
        Resources, Meta(description="Of the router's container; default: requests of 250m CPU and 512Mi.")
    ] = msgspec.field(default_factory=Resources)
    api_keys_secret: Annotated[
        SecretKey | None,
        Meta(
            description="Keys that clients must present, one a line; absent: no key is asked for. Routers follow a "
            "change of the Secret's content without a restart."
        ),
    ] = None
    tls_secret_name: Annotated[
        ObjectName | None,
        Meta(
            description="Secret with tls.crt, tls.key and ca.crt for the stream between sidecars and routers. "
            "The certificate must be valid for <pool>-sync.<namespace>.svc. Absent: not encrypted. Routers follow a "
            "renewed certificate without a restart; workers read ca.crt when they start."
        ),
    ] = None
    pod_template: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Anything else that a router's pod can carry, merged over it (strategic merge, metadata "
            "and spec). What would break the pool is refused by name."
        ),
    ] = None

    def __post_init__(self) -> None:
        refuse_owned_flags("router.args", self.args, ROUTER_FLAGS)

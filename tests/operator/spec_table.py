"""Specs that are taken, and specs that are refused: the same table for our parser and for the API server."""

from __future__ import annotations

from typing import Any

from tests.operator.pools import SIMULATED, raw_spec

ACCEPTED: dict[str, dict[str, Any]] = {
    "smallest": raw_spec(),
    "simulated": raw_spec(SIMULATED),
    "no workers": raw_spec(replicas=0),
    "custom class without a GPU": raw_spec(gpu={"class": "custom", "count": 0}),
    "tensor parallel": raw_spec(gpu={"class": "H200", "count": 4}, engine={"dataParallel": 2}),
    "engine": raw_spec(
        engine={
            "image": "registry/sglang:1",
            "imagePullPolicy": "IfNotPresent",
            "plugin": {"source": "image"},
            "args": ["--context-length=8192", "--enable-mixed-chunk"],
            "pageSize": 16,
            "memoryFraction": 0.8,
            "eviction": {"policy": "lru", "seed": 3},
            "resources": {"requests": {"cpu": 2, "memory": "16Gi"}, "limits": {"memory": "32Gi"}},
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            ],
            "sharedMemorySize": "16Gi",
            "cacheVolume": {"claimName": "cache", "mountPath": "/data"},
            "startupSeconds": 3600,
        }
    ),
    "router": raw_spec(
        router={
            "replicas": 2,
            "policy": {"name": "cache_aware", "parameters": {"cache_threshold": "0.4"}},
            "args": ["--max-waiting=10"],
            "service": {"type": "NodePort", "port": 8000, "nodePort": 30080, "annotations": {"a": "b"}},
            "apiKeysSecret": {"name": "keys", "key": "api"},
            "tlsSecretName": "tls",
            "podTemplate": {"spec": {"priorityClassName": "high"}},
        }
    ),
    "tracing": raw_spec(tracing={"endpoint": "http://collector.obs.svc:4317", "sampling": 0.1, "engine": True}),
    "rollout": raw_spec(rollout={"maxSurge": "25%", "maxUnavailable": 0, "trigger": "2030-01"}),
    "model on a volume": raw_spec(
        model={"source": {"volume": {"claimName": "weights", "path": "/models/llama"}}, "servedName": "llama"}
    ),
    "model with a token": raw_spec(model={"source": {"hub": {"tokenSecret": {"name": "hf", "key": "token"}}}}),
    "tokenizer from a config map": raw_spec(model={"tokenizer": {"kind": "configMap", "name": "tokenizer"}}),
    "pod template": raw_spec(podTemplate={"spec": {"imagePullSecrets": [{"name": "registry"}]}}),
}

# Name → spec, and words of the message that both must give.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (raw_spec(repliccas=2), "repliccas"),
    "unknown nested field": (raw_spec(engine={"evictionPolicy": "rlt"}), "evictionPolicy"),
    "no model": ({"gpu": {"class": "L40"}}, "model"),
    "no gpu": ({"model": {"name": "m"}}, "gpu"),
    "no such class": (raw_spec(gpu={"class": "A100"}), "gpu.class"),
    "negative replicas": (raw_spec(replicas=-1), "replicas"),
    "too many replicas": (raw_spec(replicas=1001), "replicas"),
    "replicas as text": (raw_spec(replicas="two"), "replicas"),
    "no GPU of a class": (raw_spec(gpu={"count": 0}), "gpu.count 0 needs"),
    "uneven data parallel": (raw_spec(gpu={"count": 3}, engine={"dataParallel": 2}), "multiple of engine.dataParallel"),
    "more tensor parallel than GPUs": (raw_spec(engine={"tensorParallel": 2}), "must not exceed gpu.count"),
    "more ranks than GPUs": (
        raw_spec(gpu={"count": 4}, engine={"tensorParallel": 4, "dataParallel": 2}),
        "must not exceed gpu.count",
    ),
    "GPU among the resources": (raw_spec(engine={"resources": {"limits": {"nvidia.com/gpu": 1}}}), "set gpu.count"),
    "block size below": (raw_spec(sidecar={"blockSize": 8}), "blockSize"),
    "block size above": (raw_spec(sidecar={"blockSize": 256}), "blockSize"),
    "page size": (raw_spec(engine={"pageSize": 0}), "pageSize"),
    "memory fraction": (raw_spec(engine={"memoryFraction": 1.2}), "memoryFraction"),
    "eviction policy": (raw_spec(engine={"eviction": {"policy": "fifo"}}), "eviction.policy"),
    "owned engine flag": (raw_spec(engine={"args": ["--port=31000"]}), "--port"),
    "owned engine flag of the simulated": (raw_spec(SIMULATED, engine={"args": ["--state-port=1"]}), "--state-port"),
    "owned router flag": (raw_spec(router={"args": ["--policy=random"]}), "--policy"),
    "environment of the pool": (
        raw_spec(engine={"env": [{"name": "KVROUTING_ENGINE_SEED", "value": "1"}]}),
        "KVROUTING_*",
    ),
    "value twice": (
        raw_spec(engine={"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}),
        "value or valueFrom",
    ),
    "value from nowhere": (raw_spec(engine={"env": [{"name": "A", "valueFrom": {}}]}), "exactly one of"),
    "hub and volume": (raw_spec(model={"source": {"hub": {}, "volume": {"path": "/m"}}}), "hub or volume"),
    "relative path": (raw_spec(model={"source": {"volume": {"path": "m"}}}), "path"),
    "tokenizer without a name": (raw_spec(model={"tokenizer": {"kind": "hub"}}), "tokenizer.name is needed"),
    "tokenizer without a path": (raw_spec(model={"tokenizer": {"kind": "volume"}}), "tokenizer.path is needed"),
    "claim with a size": (
        raw_spec(engine={"cacheVolume": {"claimName": "c", "size": "1Gi"}}),
        "a claim has its own size",
    ),
    "nothing may be replaced": (raw_spec(rollout={"maxSurge": 0, "maxUnavailable": "0%"}), "must not both be 0"),
    "quantity": (raw_spec(engine={"resources": {"limits": {"memory": "lots"}}}), "memory"),
    "node port of a cluster IP": (raw_spec(router={"service": {"nodePort": 30080}}), "needs type NodePort"),
    "no routers": (raw_spec(router={"replicas": 0}), "replicas"),
    "sampling": (raw_spec(tracing={"endpoint": "http://c:4317", "sampling": 2}), "sampling"),
    "collector without a scheme": (raw_spec(tracing={"endpoint": "c:4317"}), "endpoint"),
    "drain": (raw_spec(drain={"timeoutSeconds": 0}), "timeoutSeconds"),
}

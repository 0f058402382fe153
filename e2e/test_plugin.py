"""The init container that carries the eviction plug-in into a stock image."""

from __future__ import annotations

import secrets

from e2e.cluster import Cluster, Object, eventually
from e2e.conftest import Release
from e2e.pool import Pool

# Stands where SGLang stands in its image: it finds plug-ins as SGLang does, and says what it has found.
_LAUNCH_SERVER = """
import sys, time
from importlib.metadata import entry_points

for plugin in entry_points(group="sglang.srt.plugins"):
    register = plugin.load()
    print("found", plugin.name, plugin.value, sys.modules[register.__module__].__file__, flush=True)
time.sleep(3600)
"""


def _pool(namespace: str, image: str) -> Object:
    stand_in = {"name": "engine", "volumeMounts": [{"name": "stand-in", "mountPath": "/sglang"}]}
    return {
        "apiVersion": "kvrouting.dev/v1alpha1",
        "kind": "KVRoutingPool",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {
            "model": {"name": "m", "tokenizer": {"kind": "bytes"}},
            "gpu": {"class": "custom", "count": 0},
            "drain": {"timeoutSeconds": 1},
            "engine": {"image": image},
            "podTemplate": {
                "spec": {
                    "containers": [stand_in],
                    "volumes": [{"name": "stand-in", "configMap": {"name": "stand-in"}}],
                }
            },
        },
    }


def test_the_plug_in_is_found_in_an_image_that_does_not_have_it(cluster: Cluster, release: Release) -> None:
    # An engine's image may run as root, which `restricted` forbids.
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    with cluster.namespace(f"e2e-{secrets.token_hex(4)}", labels=labels) as namespace:
        pool = Pool(cluster=cluster, name="p", namespace=namespace)
        stand_in = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "stand-in", "namespace": namespace},
            "data": {"launch_server.py": _LAUNCH_SERVER},
        }
        # This image has a Python and, for Python, nothing of ours: what is found comes from the volume.
        cluster.apply(stand_in, _pool(namespace, cluster.images.of("sglang-plugin")))

        said = eventually(
            "the engine's container speaks",
            lambda: pool.kubectl("logs", "deployment/p-worker", "--container=engine"),
            patience_s=120,
        )

    path = "/kvrouting-plugin/kvrouting_sglang/plugin.py"
    assert said.splitlines() == [f"found kvrouting kvrouting_sglang.plugin:register {path}"]

"""A cluster to test on, by the command-line tools that a user has: kubectl and helm."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

Object = dict[str, Any]
_Found = TypeVar("_Found")

_COMMAND_S = 120.0
_POLL_S = 0.3


class CommandError(AssertionError):
    """A command that failed, with what it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Where the cluster finds the images of this working tree. registry: put before the names; empty: nothing.
    jaeger: full name of an image whose entry point is Jaeger 2; empty: there is none.
    """

    registry: str = ""
    tag: str
    jaeger: str = ""

    def of(self, name: str) -> str:
        """The full name of one image."""
        return f"{self.registry}/kvrouting/{name}:{self.tag}" if self.registry else f"kvrouting/{name}:{self.tag}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """kubeconfig: of an administrator. path: where kubectl and helm are looked for. origin: for the header."""

    kubeconfig: Path
    path: str
    images: Images
    origin: str

    @property
    def env(self) -> dict[str, str]:
        """For the tools: never the user's own context."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": self.path}

    def run(self, *command: str, stdin: str | None = None, timeout_s: float = _COMMAND_S) -> str:
        """What the command prints. Raises: CommandError."""
        done = subprocess.run(
            command, input=stdin, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise CommandError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = _COMMAND_S) -> str:
        """kubectl."""
        return self.run("kubectl", *arguments, stdin=stdin, timeout_s=timeout_s)

    def helm(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """helm."""
        return self.run("helm", *arguments, timeout_s=timeout_s)

    def get(self, *arguments: str) -> Any:
        """An object or a list, from JSON."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def items(self, *arguments: str) -> list[Object]:
        """The objects of a list."""
        return list(self.get(*arguments)["items"])

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """kubectl apply."""
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all([dict(o) for o in objects]))

    @contextmanager
    def namespace(self, name: str, *, labels: Mapping[str, str] | None = None) -> Iterator[str]:
        """A namespace of its own, gone afterwards with everything in it (without waiting for that)."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels or {})}})
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    @contextmanager
    def forwarded(self, namespace: str, target: str, port: int) -> Iterator[str]:
        """The base URL of a Service's or pod's port, through kubectl port-forward."""
        command = ["kubectl", "--namespace", namespace, "port-forward", target, f":{port}", "--address=127.0.0.1"]
        with subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
            try:
                assert p.stdout is not None
                line = p.stdout.readline()
                if not line.startswith("Forwarding from 127.0.0.1:"):
                    raise CommandError(f"{' '.join(command)}: {line}{p.stdout.read()}")
                yield f"http://127.0.0.1:{line.split(' ')[2].rsplit(':', 1)[1]}"
            finally:
                p.terminate()
                p.communicate(timeout=30)


def eventually(what: str, look: Callable[[], _Found | None], *, patience_s: float) -> _Found:
    """What `look` finds as soon as it finds something true. Raises: AssertionError that says what was waited for.

    A look that fails is repeated: between two looks an object may come or go.
    """
    end_s = time.monotonic() + patience_s
    said: object = None
    while time.monotonic() < end_s:
        try:
            found = look()
        except (AssertionError, KeyError, IndexError) as error:
            said = error
        else:
            if found:
                return found
            said = found
        time.sleep(_POLL_S)
    raise AssertionError(f"not within {patience_s:g} s: {what}; last: {said}")


def condition(body: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition in the status of an object; empty if it has none."""
    conditions: Sequence[Mapping[str, Any]] = body.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})

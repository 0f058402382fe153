"""A whole pool of real processes on this machine, and ways to look into each of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvrouting_simulator.demo.cluster import Cluster
from kvrouting_simulator.demo.pool_plan import worker_id
from tests.engine_sockets import ask_state

_PATIENCE_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One answer of `/generate`. decision: what the router's header says; None without a header.

    events: of the stream, or the only body of an answer that was no stream. ended_properly: a stream with its end mark.
    """

    status: int
    events: Sequence[Mapping[str, Any]]
    decision: Mapping[str, Any] | None
    ended_properly: bool

    @property
    def meta(self) -> Mapping[str, Any]:
        """`meta_info` of the last event that has one."""
        found: Mapping[str, Any] = next(e["meta_info"] for e in reversed(self.events) if "meta_info" in e)
        return found

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The error event at its end."""
        return next((e["error"] for e in self.events if "error" in e), None)

    @property
    def chosen(self) -> Mapping[str, Any]:
        """The candidate that was chosen, with its terms."""
        assert self.decision is not None
        decision = self.decision
        found: Mapping[str, Any] = next(c for c in decision["candidates"] if c["worker"] == decision["worker"])
        return found


async def command(*arguments: str) -> asyncio.subprocess.Process:
    """`kvrouting ARGUMENTS` in a terminal of 120 characters; stdout holds all that it says."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrouting_cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "120"},
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """As in a terminal, also where the tests themselves run in the background of a script, which ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def generate(
    url: str,
    tokens: Sequence[int],
    *,
    output_tokens: int = 4,
    stream: bool = True,
    timeout_s: float = _PATIENCE_S,
    headers: Mapping[str, str] | None = None,
) -> Generated:
    """One answer of `/generate` at a router or an engine."""
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": output_tokens, "ignore_eos": True},
        "stream": stream,
    }
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/generate", json=body, headers=headers) as response,
    ):
        text = await response.text()
    header = response.headers.get("x-kvrouting-decision")
    payloads = [line[6:] for line in text.splitlines() if line.startswith("data: ")] if stream else [text]
    return Generated(
        status=response.status,
        events=[json.loads(payload) for payload in payloads if payload != "[DONE]"],
        decision=json.loads(header) if header else None,
        ended_properly=bool(payloads) and payloads[-1] == "[DONE]",
    )


class LocalPool(Cluster):
    """`async with LocalPool(PoolPlan(...), folder=tmp_path) as pool`: everything is live, and gone afterwards.

    To hurt it: `pool.engines[0].kill()`, `.freeze()` (SIGSTOP), `.resume()`, `.stop()`, `.start()`; sidecars and
    routers alike. Ports stay the same.
    """

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        output_tokens: int = 4,
        url: str | None = None,
        stream: bool = True,
        timeout_s: float = _PATIENCE_S,
    ) -> Generated:
        """One answer through the first router, or from `url`."""
        return await generate(
            url or self.router_url, tokens, output_tokens=output_tokens, stream=stream, timeout_s=timeout_s
        )

    async def worker(self, number: int, *, router: int = 0) -> Mapping[str, Any]:
        """What a router believes of one worker."""
        return (await self.workers(router=router))[worker_id(number)]

    async def engine_state(self, number: int) -> Mapping[str, Any]:
        """The engine's own word on epoch, position, pages and digest, from its state socket."""
        (state,) = await ask_state(self.engine_ports[number].state, "state", seconds=_PATIENCE_S)
        found: Mapping[str, Any] = state
        return found

    async def sidecar_page(self, number: int, path: str) -> Any:
        """A JSON page of a sidecar."""
        return await self.get_json(f"http://127.0.0.1:{self.engine_ports[number].sidecar}{path}")

    async def settled(self, number: int, *, router: int = 0) -> Mapping[str, Any]:
        """Returns the router's view of a worker once it is that of the engine: nothing runs, nothing is on its way."""

        async def same() -> bool:
            state, view = await self.engine_state(number), await self.worker(number, router=router)
            return bool(view["end_to_end_verified"]) and view["cached_tokens"] == state["cached_tokens"]

        await eventually(same)
        return await self.worker(number, router=router)


async def eventually(condition: Callable[[], Awaitable[bool]], *, patience_s: float = _PATIENCE_S) -> None:
    """Returns when the condition holds. Raises: TimeoutError if that takes too long."""
    async with asyncio.timeout(patience_s):
        while not await condition():
            await asyncio.sleep(_POLL_S)

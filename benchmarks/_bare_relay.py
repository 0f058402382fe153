"""The least that a relay made of aiohttp can do: a server, a client session, workers in turn, bytes passed on.

`python -m benchmarks._bare_relay URL...` prints {"ports": [PORT]}.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence

import aiohttp
import uvloop
from aiohttp import web


async def _serve(urls: Sequence[str]) -> None:
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    )
    workers = itertools.cycle(urls)

    async def relay(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        async with session.post(next(workers) + request.path, data=body, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    runner = web.ServerRunner(web.Server(relay, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(json.dumps({"ports": [runner.addresses[0][1]]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1:]))

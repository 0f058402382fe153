"""One piece of work in the company of others that must not fail while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def with_background_tasks(work: Coroutine[Any, Any, Result], *others: Coroutine[Any, Any, object]) -> Result:
    """Returns what the work returns; then, and on any error, the others are cancelled.

    Raises: the first error of any of them, as it is; an error of the others cancels the work.
    """
    main = asyncio.ensure_future(work)
    background_tasks = [asyncio.ensure_future(other) for other in others]
    try:
        pending: set[asyncio.Future[Any]] = {main, *background_tasks}
        while not main.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    finally:
        everyone = (main, *background_tasks)
        for task in everyone:
            task.cancel()
        await asyncio.gather(*everyone, return_exceptions=True)

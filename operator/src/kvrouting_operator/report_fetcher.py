"""Asks the routers of a pool for what they believe of its workers, by HTTP."""

from __future__ import annotations

from collections.abc import Iterable

import urllib3

from kvrouting_operator.router_report import (
    PoolReport,
    RankView,
    RouterAddress,
    UnreadablePageError,
    gathered,
    read_page,
)


class HttpReportFetcher:
    """limit_s: for one router's answer. A router that does not answer is asked again in the next round."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit = urllib3.Timeout(total=limit_s)
        self._pool = urllib3.PoolManager(num_pools=100, maxsize=2, retries=urllib3.Retry(total=0))

    def __call__(self, routers: Iterable[RouterAddress], *, block_size_tokens: int) -> PoolReport:
        """See ReportFetcher."""
        pages: list[list[RankView]] = []
        silent: list[str] = []
        for router in routers:
            try:
                pages.append(self._page(router))
            except (urllib3.exceptions.HTTPError, UnreadablePageError) as error:
                silent.append(f"{router.pod}: {error}")
        workers = gathered(pages, block_size_tokens=block_size_tokens)
        return PoolReport(answered=len(pages), silent=tuple(silent), workers=workers)

    def _page(self, router: RouterAddress) -> list[RankView]:
        headers = {"Authorization": f"Bearer {router.api_key}"} if router.api_key else {}
        answer = self._pool.request("GET", f"{router.url}/workers", headers=headers, timeout=self._limit)
        if answer.status != 200:
            raise UnreadablePageError(
                f"/workers answered {answer.status}: {answer.data[:200].decode(errors='replace')}"
            )
        return read_page(answer.data)

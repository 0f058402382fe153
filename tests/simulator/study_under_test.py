"""A small study in a folder, as a user would write it."""

from __future__ import annotations

from pathlib import Path

STUDY = """
title = "Two policies"
about = "The gain is {gain}."
paper = "is best"
explanation = "Because of {gain}."
seeds = [1, 2]
series = "policy"
x = "rate"
requests = 24

[scenario]
[scenario.workload]
groups = 4
prompts_per_group = 8
lengths_tokens = [128, 256]
[[scenario.workers]]
count = 2
page_size = 64
capacity_tokens = 2048

[[axes]]
name = "policy"
points = [
  { label = "random", set = { policy = "random", "workers.eviction" = "lru" } },
  { label = "best", set = { policy = "lbgr-released", "workers.eviction" = "rlt" } },
]

[[axes]]
name = "rate"
unit = "requests/s"
path = "workload.arrivals.rate_per_s"
values = [4.0, 8.0]

[[claims]]
name = "gain"
says = "median latency"
paper = "2x"
figure = "latency_p50_s"
form = "ratio"
of = { policy = "random" }
over = { policy = "best" }

[quick]
seeds = [1]
requests = 8
keep = { rate = [8.0] }
"""


def write_study(folder: Path, text: str = STUDY, name: str = "small") -> Path:
    """Returns: the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder

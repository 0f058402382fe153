"""What the demo's report says before its figures."""

from __future__ import annotations

from kvrouting_simulator.demo.scenario import DemoScenario
from kvrouting_simulator.demo.sglang_engines import SglangEngines


def introduction(scenario: DemoScenario, *, virtual: bool) -> tuple[str, ...]:
    """One text for each paragraph. virtual: both halves were also simulated."""
    real_engines = isinstance(scenario.launcher, SglangEngines)
    engines = scenario.plan(scenario.setups[0]).starts.described
    lines = [
        (
            f"{scenario.engines} engines ({engines}) with KV caches of "
            f"{scenario.capacity_tokens:,} tokens, a sidecar each, and one router ran as processes of their own on "
            "this machine. The same requests at the same times went through the router's HTTP API as streams, once "
            "for each set-up; all processes were new in each half."
        ),
        (
            f"The requests are GSP, prompts that share their first half within a group: {scenario.gsp.groups} groups, "
            "on caches of such a size that shared prefixes stand to caches as in the whole benchmark."
        ),
        (
            "In each half one engine is killed with signal 9 while it has requests, and started again with an empty "
            "cache. A request whose answer had not begun goes to another worker inside the router. One whose answer "
            "was cut is sent again by the client, once; it is counted in the table and its latency counts from its "
            "first arrival."
        ),
    ]
    if real_engines:
        lines += _REAL_ENGINES
    if virtual or real_engines:
        lines.append(_threshold(scenario, simulated=virtual))
    if virtual:
        lines.append(
            "Agreement: the same scenario with the same arrivals and the failure as it happened, run by the same "
            "engine model, index and policies on a virtual clock, without processes."
        )
    return tuple(lines)


_REAL_ENGINES = (
    (
        "The engines are real servers with a tiny model of random weights. With LRU they are stock SGLang, whose cache "
        "the router knows from its events; in the other half they run the plug-in, and must prove it before they get a "
        "request."
    ),
    (
        "All processes share this machine's cores, and an engine that starts again takes most of one for about a "
        "minute: times say more about the machine than about a policy, hit rates do not depend on it as much. There "
        "is no comparison with the virtual clock, which knows the times of GPUs and not of this machine."
    ),
)


def _threshold(scenario: DemoScenario, *, simulated: bool) -> str:
    text = (
        f"{scenario.setups[0].policy} follows a prefix that is more than half of the prompt, and here none is: GSP "
        "shares exactly half. So it only keeps the caches equally full."
    )
    return f"{text} The last column shows, simulated, what it does with a threshold below half." if simulated else text

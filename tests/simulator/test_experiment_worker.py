"""A worker on the virtual clock tells what it did when an engine would publish it."""

from __future__ import annotations

from array import array

from kvrouting_core.identity import WorkerId
from kvrouting_simulator.engine_model import EngineRequest, SeededAnswers
from kvrouting_simulator.experiment.clock import VirtualClock
from kvrouting_simulator.experiment.index_feed import block_hasher
from kvrouting_simulator.experiment.scenario import WorkerSpec
from kvrouting_simulator.experiment.simulation import NAMESPACE
from kvrouting_simulator.experiment.worker import SimulatedWorker, StepResult


def test_what_a_step_evicts_at_its_begin_is_told_at_its_end() -> None:
    clock = VirtualClock()
    told: list[tuple[float, list[str], list[int]]] = []

    def on_step(_worker: SimulatedWorker, result: StepResult) -> None:
        kinds = sorted({type(delta).__name__ for delta in result.deltas})
        told.append((clock.now_ms, kinds, [token.index for token in result.tokens]))

    worker = SimulatedWorker(
        worker=WorkerId("w0/0"),
        spec=WorkerSpec(capacity_tokens=1000, eviction="lru"),
        seed=1,
        clock=clock,
        blocks=block_hasher(64),
        namespace=NAMESPACE,
        answer_token=SeededAnswers(seed=1, vocabulary_size=1000),
        on_step=on_step,
    )
    for number in range(2):
        prompt = array("I", range(number * 10_000, number * 10_000 + 640))
        request = EngineRequest(request_id=f"r{number}", prompt=prompt, output_tokens=1, namespace=NAMESPACE)
        clock.at(number * 10_000.0, lambda request=request: worker.submit(request))  # type: ignore[misc]
    clock.run()
    assert [(kinds, tokens) for _, kinds, tokens in told] == [(["Extend"], [0]), (["Extend", "Trim"], [0])]
    assert told[1][0] > 10_000

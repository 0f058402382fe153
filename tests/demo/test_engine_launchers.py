"""How the demo starts its engines: simulated ones, or real servers; and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_simulator.demo.command import demo
from kvrouting_simulator.demo.engine_launcher import EnginePorts, EngineSettings
from kvrouting_simulator.demo.introduction import introduction
from kvrouting_simulator.demo.pool_plan import PoolPlan, RouterPorts, SecretFiles, router_spec, sidecar_spec
from kvrouting_simulator.demo.scenario import DemoScenario, sglang_scenario
from kvrouting_simulator.demo.sglang_engines import NoSglangError, SglangEngines, write_model

PORTS = EnginePorts(http=1, kv_events=2, replay=3, load=4, state=5, sidecar=6)
ENGINES = SglangEngines(python=Path("/venv/bin/python"), model_folder=Path("/model"), version="0.5.23")
SECRETS = SecretFiles(hash_key=Path("/hash-key"), join_token=Path("/join-token"))


def settings(eviction: str, *, options: Sequence[str] = ()) -> EngineSettings:
    return EngineSettings(capacity_tokens=3600, page_size=1, eviction=eviction, seed=2, options=options)


def value(command: Sequence[str], option: str) -> str:
    return command[list(command).index(option) + 1]


def test_a_real_server_with_rlt_runs_the_plug_in_and_its_sidecar_asks_for_the_proof() -> None:
    spec = ENGINES.spec(settings("rlt", options=["--more", "1"]), 1, PORTS)
    assert spec.name == "engine-1"
    assert spec.command[:3] == ("/venv/bin/python", "-m", "sglang.launch_server")
    assert spec.command[-2:] == ("--more", "1")
    assert value(spec.command, "--radix-cache-backend") == "rlt"
    assert value(spec.command, "--max-total-tokens") == "3600"
    assert value(spec.command, "--random-seed") == "2001"
    events = json.loads(value(spec.command, "--kv-events-config"))
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://127.0.0.1:2", "tcp://127.0.0.1:3")
    assert spec.environment["KVROUTING_ENGINE_POLICY"] == "rlt"
    assert spec.environment["KVROUTING_ENGINE_STATE_ENDPOINT"] == "tcp://127.0.0.1:5"
    assert spec.environment["HF_HUB_OFFLINE"] == "1"
    assert ENGINES.sidecar_options(settings("rlt"), PORTS) == {
        "--state-endpoint": "tcp://127.0.0.1:5",
        "--require-eviction": "rlt",
    }


def test_a_real_server_with_lru_has_nothing_of_ours() -> None:
    spec = ENGINES.spec(settings("lru"), 0, PORTS)
    assert "--radix-cache-backend" not in spec.command
    assert not [name for name in spec.environment if name.startswith("KVROUTING")]
    assert ENGINES.sidecar_options(settings("lru"), PORTS) == {"--state-endpoint": "none"}


def test_sidecar_and_router_are_told_what_the_launcher_says_of_its_engines() -> None:
    real = sglang_scenario(ENGINES, seed=1)
    plan = real.plan(real.setups[1])
    sidecar = sidecar_spec(plan, 0, PORTS, [RouterPorts(http=7, grpc=8)], SECRETS).command
    assert value(sidecar, "--require-eviction") == "rlt-adaptive"
    assert "--gpu-class" not in sidecar
    assert value(router_spec(plan, 0, RouterPorts(http=7, grpc=8), SECRETS).command, "--model") == "tiny-llama"
    simulated = PoolPlan(worker_class="H200", eviction="slru")
    sidecar = sidecar_spec(simulated, 0, PORTS, [RouterPorts(http=7, grpc=8)], SECRETS).command
    assert (value(sidecar, "--gpu-class"), value(sidecar, "--require-eviction")) == ("H200", "slru")
    engine = simulated.starts.spec(simulated.settings, 0, PORTS).command
    assert engine[:3] == (sys.executable, "-m", "kvrouting_simulator.engine_process")
    assert (value(engine, "--worker-class"), value(engine, "--state-port")) == ("H200", "5")


def test_what_all_groups_share_stands_to_a_cache_as_in_the_whole_benchmark() -> None:
    for scenario in (DemoScenario(), sglang_scenario(ENGINES, seed=1)):
        gsp = scenario.gsp
        lengths = [gsp.lengths_tokens[group % len(gsp.lengths_tokens)] for group in range(gsp.groups)]
        shared = sum(length * gsp.prefix_ratio for length in lengths)
        assert 0.95 < shared / scenario.capacity_tokens < 1.1
        assert max(lengths) + gsp.output_tokens < scenario.capacity_tokens


def test_the_report_says_what_ran_and_why_there_is_no_virtual_twin() -> None:
    real = " ".join(introduction(sglang_scenario(ENGINES, seed=1), virtual=False))
    assert "2 engines (SGLang 0.5.23 on the CPU) with KV caches of 3,600 tokens" in real
    assert "no comparison with the virtual clock" in real
    assert "The last column" not in real
    simulated = " ".join(introduction(DemoScenario(), virtual=True))
    assert "4 engines (simulated L40)" in simulated
    assert "Agreement" in simulated
    assert "stock SGLang" not in simulated


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "sglang"], "belong together"),
        (["--engine-python", sys.executable], "belong together"),
        (["--engine", "sglang", "--engine-python", sys.executable, "--virtual"], "the virtual clock does not know"),
        (["--engine", "sglang", "--engine-python", "/no/such/python"], "does not exist"),
        (["--engine", "vllm"], "'vllm' is not one of 'simulated', 'sglang'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(demo, ["--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def python_that_says(folder: Path, words: str, *, code: int = 0) -> Path:
    """A stand-in for a Python of another environment."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{words}' >&{1 if code == 0 else 2}\nexit {code}\n")
    script.chmod(0o755)
    return script


def test_an_environment_is_looked_into_before_anything_starts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 512
    found = SglangEngines.found(python_that_says(tmp_path, "0.5.23 True"), model_folder=model)
    assert found.described == "SGLang 0.5.23 on the CPU"
    with pytest.raises(NoSglangError, match=r"SGLang 0\.5\.23 without the plug-in"):
        SglangEngines.found(python_that_says(tmp_path, "0.5.23 False"), model_folder=model)
    absent = python_that_says(tmp_path, "PackageNotFoundError: sglang", code=1)
    with pytest.raises(NoSglangError, match=r"has no SGLang \(PackageNotFoundError: sglang\); `make demo ENGINE=sgl"):
        SglangEngines.found(absent, model_folder=model)
    with pytest.raises(NoSglangError, match="does not run"):
        SglangEngines.found(tmp_path, model_folder=model)


def test_the_demo_ends_with_the_reason_where_there_is_no_sglang(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        demo,
        [
            "--out", str(tmp_path / "out"), "--engine", "sglang",
            "--engine-python", str(python_that_says(tmp_path, "PackageNotFoundError: sglang", code=1)),
        ],
    )  # fmt: skip
    assert result.exit_code == 1
    assert "has no SGLang" in result.output

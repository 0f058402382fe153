"""Settings by environment variables."""

from __future__ import annotations

import pytest

from kvrouting_sglang.settings import EngineSettings, endpoint_of_rank


def test_defaults() -> None:
    settings = EngineSettings.from_environment({"HOME": "/x"})
    assert (settings.policy, settings.seed, settings.state_endpoint) == ("rlt-adaptive", None, "tcp://127.0.0.1:5579")


def test_everything_can_be_set() -> None:
    settings = EngineSettings.from_environment(
        {
            "KVROUTING_ENGINE_POLICY": "slru",
            "KVROUTING_ENGINE_SEED": "-4",
            "KVROUTING_ENGINE_STATE_ENDPOINT": "tcp://[::1]:6000",
        }
    )
    assert settings == EngineSettings(policy="slru", seed=-4, state_endpoint="tcp://[::1]:6000")
    assert EngineSettings.from_environment({"KVROUTING_ENGINE_STATE_ENDPOINT": "off"}).state_endpoint is None


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("POLICY", "fifo", "rlt"),
        ("SEED", "soon", "whole number"),
        ("STATE_ENDPOINT", "127.0.0.1:5579", "tcp://HOST:PORT"),
        ("STATE_ENDPOINT", "tcp://127.0.0.1:0", "tcp://HOST:PORT"),
        ("STATE_ENDPOINT", "tcp://:5579", "tcp://HOST:PORT"),
        ("STATE_ENDPONT", "off", "KVROUTING_ENGINE_STATE_ENDPOINT"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(name: str, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        EngineSettings.from_environment({f"KVROUTING_ENGINE_{name}": text})
    assert name in str(raised.value)


def test_each_rank_has_a_port_of_its_own() -> None:
    assert endpoint_of_rank("tcp://127.0.0.1:5579", 0) == "tcp://127.0.0.1:5579"
    assert endpoint_of_rank("tcp://127.0.0.1:5579", 7) == "tcp://127.0.0.1:5586"
    with pytest.raises(ValueError, match="rank 9"):
        endpoint_of_rank("tcp://127.0.0.1:65530", 9)

"""Options and environment become settings, and what is wrong says what is right."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_sidecar.command import settings_from, sidecar
from kvrouting_sidecar.settings import Settings

_KEY = "00112233445566778899aabbccddeeff"
_LEAST = ["--pool", "p", "--router", "routers:9090", "--hash-key", _KEY]


def _settings(arguments: list[str], environment: dict[str, str] | None = None) -> Settings:
    """As the command would make them."""
    runner = CliRunner(env=environment or {})
    with runner.isolation(), sidecar.make_context("sidecar", list(arguments)) as context:
        options = dict(context.params)
    options.pop("log_level")
    return settings_from(**options)


def _refusal(arguments: list[str], environment: dict[str, str] | None = None) -> str:
    result = CliRunner(env=environment or {}).invoke(sidecar, arguments)
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_few_options_are_enough() -> None:
    settings = _settings(_LEAST)
    assert settings.pool == "p"
    assert settings.hash_key == bytes.fromhex(_KEY)
    assert settings.routers[0].host == "routers"
    assert settings.engine_url == settings.advertise_endpoint == "http://127.0.0.1:30000"
    assert settings.pod_uid
    assert settings.block_size_tokens == 64
    assert settings.endpoints.state == "tcp://127.0.0.1:5579"


def test_the_environment_gives_what_the_command_line_does_not(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(_KEY + "\n")
    (tmp_path / "join").write_text("join-secret\n")
    environment = {
        "KVROUTING_SIDECAR_POOL": "from-env",
        "KVROUTING_SIDECAR_ROUTER": "a:1 [::1]:2",
        "KVROUTING_SIDECAR_HASH_KEY_FILE": str(tmp_path / "key"),
        "KVROUTING_SIDECAR_JOIN_TOKEN_FILE": str(tmp_path / "join"),
        "KVROUTING_SIDECAR_STATE_ENDPOINT": "none",
        "KVROUTING_SIDECAR_REQUIRE_EVICTION": "rlt",
    }
    settings = _settings([], environment)
    assert settings.pool == "from-env"
    assert [(name.host, name.port) for name in settings.routers] == [("a", 1), ("::1", 2)]
    assert settings.credentials.join_token == "join-secret"
    assert settings.endpoints.state is None
    assert settings.require_eviction == "rlt"


def test_a_key_file_may_hold_raw_bytes(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(range(128, 160)))
    settings = _settings([*_LEAST[:4], "--hash-key-file", str(tmp_path / "raw")])
    assert settings.hash_key == bytes(range(128, 160))


def test_secrets_are_not_shown() -> None:
    assert _KEY not in repr(_settings(_LEAST))
    assert "s3cret" not in repr(_settings([*_LEAST, "--join-token", "s3cret", "--drain-token", "s3cret"]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pool", "p", "--hash-key", _KEY], "give --router host:port"),
        (["--pool", "p", "--router", "r:1"], "--hash-key-file"),
        ([*_LEAST[:4], "--hash-key", "xyz"], "not hexadecimal"),
        ([*_LEAST[:4], "--hash-key", "00ff"], "32..128 hex digits"),
        ([*_LEAST, "--router", "routers"], "must be host:port"),
        ([*_LEAST, "--router", "routers:99999"], "outside 1..65535"),
        ([*_LEAST, "--block-size", "8"], "16..128"),
        ([*_LEAST, "--engine-url", "engine:30000"], "must be http://host:port"),
        ([*_LEAST, "--state-endpoint", "5579"], "tcp://host:port"),
        ([*_LEAST, "--drain-timeout", "0"], "must be above 0"),
        ([*_LEAST, "--queue-mib", "0"], "less than 1 MiB"),
        ([*_LEAST, "--verify-interval", "-1"], "must be above 0"),
        ([*_LEAST, "--flush-interval-ms", "5000"], "outside 0.001..1 s"),
        ([*_LEAST, "--router-private-key", __file__], "given together"),
        ([*_LEAST, "--router-private-key", __file__, "--router-certificate", __file__], "routers' CA"),
        ([*_LEAST, "--pod-uid", "a/b"], "without '/'"),
        ([*_LEAST, "--join-token", ""], "join token is empty"),
        ([*_LEAST, "--http-port", "70000"], "outside 0..65535"),
        ([*_LEAST, "--lookup-interval", "0"], "must be above 0"),
        ([*_LEAST, "--lookup-interval", "nan"], "must be above 0"),
        ([*_LEAST, "--verify-interval", "nan"], "must be above 0"),
        ([*_LEAST, "--drain-timeout", "nan"], "must be above 0"),
        ([*_LEAST, "--engine-url", "http://engine:99999"], "must be http://host:port"),
        ([*_LEAST, "--state-endpoint", "tcp://127.0.0.1:0"], "tcp://host:port"),
        ([*_LEAST, "--router", "http://routers:9090"], "without scheme"),
        ([*_LEAST, "--router-ca", __file__], "no PEM"),
        ([*_LEAST, "--join-token", "schlüssel"], "printable ASCII"),
        ([*_LEAST, "--drain-header", "drain token"], "name of a header"),
    ],
)
def test_a_wrong_option_says_what_is_right(arguments: list[str], words: str) -> None:
    assert words in _refusal(arguments)


def test_a_port_in_use_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [*_LEAST, "--http-host", "127.0.0.1", "--http-port", str(port)]
        result = CliRunner().invoke(sidecar, arguments)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith(
        f"Error: cannot listen on 127.0.0.1:{port} (Address already in use)"
    )


def test_a_secret_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "join").write_bytes(b"\xff\xfe")
    assert "is no text in UTF-8" in _refusal([*_LEAST, "--join-token-file", str(tmp_path / "join")])

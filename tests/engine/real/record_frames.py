"""Records what a real server sends, as test data for the simulated engine: tests/data/sglang/.

`SGLANG_USE_CPU_ENGINE=1 .venv-engine/bin/python -m tests.engine.real.record_frames`
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from tests.engine.real.servers import RealServer
from tests.engine.real.tiny_model import write_model

FOLDER = Path(__file__).parents[2] / "data" / "sglang"
MODEL = "/models/tiny"
"""Stands for the model's folder in the recordings."""
PREFIX = "/opt/engine"
"""Stands for the folder of the engine's packages."""

GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "bababa dada"}],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("generate", "/generate", {"input_ids": list(range(10, 60)), "sampling_params": GREEDY}),
    ("generate again", "/generate", {"input_ids": list(range(10, 60)), "sampling_params": GREEDY}),
    ("generate stream", "/generate", {"input_ids": list(range(10, 80)), "sampling_params": GREEDY, "stream": True}),
    ("completion", "/v1/completions", {"prompt": "bababa", "max_tokens": 4, "temperature": 0, "ignore_eos": True}),
    (
        "completion stream",
        "/v1/completions",
        {
            "prompt": "bababa dada",
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("chat", "/v1/chat/completions", CHAT),
    (
        "chat stream",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("chat stream without usage", "/v1/chat/completions", {**CHAT, "stream": True}),
    ("error: prompt too long", "/generate", {"input_ids": [7] * 1500, "sampling_params": GREEDY}),
    ("error: chat too long", "/v1/chat/completions", {**CHAT, "max_tokens": 5000}),
    ("error: no messages", "/v1/chat/completions", {"max_tokens": 4}),
    ("error: stream of a bad request", "/v1/completions", {"prompt": [7] * 1500, "max_tokens": 4, "stream": True}),
    ("error: no JSON", "/v1/completions", b"{"),
)
PATHS = ("/health", "/v1/models", "/model_info", "/server_info", "/v1/loads")


def main() -> None:
    """Starts a server, asks it everything, writes the answers."""
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "tiny")
        server = RealServer(
            model, log=Path(scratch) / "log", flags=("--served-model-name", "tiny", "--random-seed", "11")
        )
        try:
            server.start().wait_until_ready()
            record(server, str(model))
        finally:
            server.stop()


def record(server: RealServer, model: str) -> None:
    """Writes events.json, load.json and http.json."""
    context = zmq.Context()
    events = _subscriber(context, server.ports.events)
    load = _subscriber(context, server.ports.load)
    time.sleep(1.0)
    answers = [_exchange(server, name, path, body) for name, path, body in REQUESTS]
    for number in range(9):
        server.generate([100 + number] * 300)
    answers += [_exchange(server, f"GET {path}", path, None) for path in PATHS]
    answers.append(_exchange(server, "flush", "/flush_cache", {}))
    server.generate(range(20, 40))
    time.sleep(1.5)
    replay = _replay(context, server.ports.replay)
    _write("events.json", {"published": _received(events), "replayed_from_0": replay}, model)
    _write("load.json", {"published": _received(load)}, model)
    _write("http.json", {"exchanges": answers}, model)


def _subscriber(context: zmq.Context[Any], port: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def _received(socket: zmq.Socket[Any]) -> list[list[str]]:
    """Messages as lists of frames, each in hexadecimal."""
    messages = []
    while socket.poll(200):
        messages.append([frame.hex() for frame in socket.recv_multipart()])
    return messages


def _replay(context: zmq.Context[Any], port: int) -> list[list[str]]:
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    time.sleep(0.5)
    return _received(socket)


def _exchange(server: RealServer, name: str, path: str, body: Any) -> Mapping[str, Any]:
    """One request and what came back: status, headers, and the body as text."""
    sent = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", sent, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, headers, text = answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        status, headers, text = error.code, dict(error.headers), error.read().decode()
    return {
        "name": name,
        "path": path,
        "sent": None if sent is None else sent.decode(),
        "status": status,
        "headers": {key.lower(): value for key, value in headers.items() if key.lower() != "date"},
        "body": text,
    }


def _write(name: str, recorded: Mapping[str, Any], model: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"engine": "sglang 0.5.23", **recorded}, indent=1)
    (FOLDER / name).write_text(text.replace(model, MODEL).replace(sys.prefix, PREFIX) + "\n")


if __name__ == "__main__":
    main()

"""Real SGLang servers on the CPU with a tiny random model, stock or with the plug-in."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvrouting_simulator.demo.engine_launcher import EnginePorts, EngineSettings
from kvrouting_simulator.demo.processes import ManagedProcess, ProcessSpec

VOCABULARY_SIZE = 512
CONTEXT_TOKENS = 2048
# Prefill at about .2 ms a token on one core, so that what a cache saves is seen. Few and narrow heads: the attention of
# torch on a CPU recomputes the cached part of a prompt, and must be a small part of the whole.
_MODEL_CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
}
# Nothing is fetched, and no engine takes more than a core to compute.
_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_FLAGS = (
    "--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32",
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--context-length", str(CONTEXT_TOKENS), "--max-running-requests", "8",
    "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--enable-cache-report",
)  # fmt: skip
_CAPACITY_TOKENS = 4 * CONTEXT_TOKENS
_HEALTH_LIMIT_S = 5.0
_PAUSE_S = 0.25
_LOOK_LIMIT_S = 120.0
_LOOK = (
    "import importlib.metadata as m; "
    "names = [e.name for e in m.entry_points(group='sglang.srt.plugins')]; "
    "print(m.version('sglang'), 'kvrouting' in names)"
)


class NoSglangError(RuntimeError):
    """A Python in which SGLang or the plug-in is not installed."""


def write_model(folder: Path) -> Path:
    """The description of the model; its weights are random. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL_CONFIG, indent=1))
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangEngines:
    """Each is an `sglang.launch_server` of `python`'s environment.

    Eviction `lru` is stock SGLang without the plug-in, so that nothing of ours is in it; any other is the plug-in's.
    model_folder: as `write_model` leaves it; the servers know token ids only. version: of SGLang, for the report.
    """

    python: Path
    model_folder: Path
    version: str
    model: str = "tiny-llama"
    start_limit_s: float = 600.0

    @classmethod
    def found(cls, python: Path, *, model_folder: Path) -> SglangEngines:
        """Looks into that Python's environment. Raises: NoSglangError that says what is missing."""
        try:
            told = subprocess.run(  # noqa: S603 - the user names the program
                [python, "-c", _LOOK], capture_output=True, text=True, timeout=_LOOK_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoSglangError(f"{python} does not run: {error}") from error
        if told.returncode:
            last = (told.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise NoSglangError(
                f"{python} has no SGLang ({last}); `make demo ENGINE=sglang` makes an environment that has"
            )
        version, plugged = told.stdout.split()
        if plugged != "True":
            raise NoSglangError(f"{python} has SGLang {version} without the plug-in: pip install 'kvrouting[engine]'")
        return cls(python=python, model_folder=model_folder, version=version)

    @property
    def described(self) -> str:
        """The server."""
        return f"SGLang {self.version} on the CPU"

    def spec(self, settings: EngineSettings, number: int, ports: EnginePorts) -> ProcessSpec:
        """The process of engine `number`."""
        options: dict[str, object] = {
            "--model-path": self.model_folder,
            "--served-model-name": self.model,
            "--host": "127.0.0.1",
            "--port": ports.http,
            "--page-size": settings.page_size,
            "--max-total-tokens": settings.capacity_tokens or _CAPACITY_TOKENS,
            "--random-seed": settings.seed * 1000 + number,
            "--kv-events-config": json.dumps(_events_config(ports)),
            "--load-publish-endpoint": f"tcp://*:{ports.load}",
        }
        environment = dict(_ENVIRONMENT)
        if _by_plug_in(settings):
            options["--radix-cache-backend"] = "rlt"
            environment["KVROUTING_ENGINE_POLICY"] = settings.eviction
            environment["KVROUTING_ENGINE_STATE_ENDPOINT"] = _state_endpoint(ports)
        words = [word for name, value in options.items() for word in (name, str(value))]
        return ProcessSpec(
            name=f"engine-{number}",
            command=(str(self.python), "-m", "sglang.launch_server", *words, *_FLAGS, *settings.options),
            environment=environment,
        )

    def sidecar_options(self, settings: EngineSettings, ports: EnginePorts) -> Mapping[str, object]:
        """Stock SGLang has no state socket and proves nothing. No class: nobody measured such an engine."""
        if not _by_plug_in(settings):
            return {"--state-endpoint": "none"}
        return {"--state-endpoint": _state_endpoint(ports), "--require-eviction": settings.eviction}

    async def wait_ready(self, process: ManagedProcess, ports: EnginePorts) -> None:
        """Returns when its health page says so. Raises: ProcessFailedError."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def healthy() -> bool | None:
                try:
                    async with session.get(f"http://127.0.0.1:{ports.http}/health") as response:
                        if response.ok:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not yet
                await asyncio.sleep(_PAUSE_S)
                return None

            await process.wait_until(healthy, what="was not healthy", timeout_s=self.start_limit_s)


def _by_plug_in(settings: EngineSettings) -> bool:
    return settings.eviction != "lru"


def _state_endpoint(ports: EnginePorts) -> str:
    return f"tcp://127.0.0.1:{ports.state}"


def _events_config(ports: EnginePorts) -> Mapping[str, object]:
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{ports.kv_events}",
        "bind": True,
        "topic": "kv-events",
        "replay_endpoint": f"tcp://127.0.0.1:{ports.replay}",
    }

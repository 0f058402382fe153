"""What the plug-in's delivery consists of: a wheel that needs nothing, and an image that adds just that."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def test_the_engine_extra_brings_no_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert project["optional-dependencies"]["engine"] == []
    assert project["entry-points"]["sglang.srt.plugins"] == {"kvrouting": "kvrouting_sglang.plugin:register"}
    assert project["requires-python"] == ">=3.10"


def test_all_pins_of_the_engine_agree() -> None:
    from kvrouting_sglang import SUPPORTED_SGLANG

    image = (ROOT / "engine/Dockerfile").read_text()
    pinned = (ROOT / "engine/requirements-test.txt").read_text()
    assert re.findall(r"^ARG SGLANG_VERSION=(.*)$", image, re.MULTILINE) == [SUPPORTED_SGLANG]
    assert re.findall(r"^sglang==(.*)$", pinned, re.MULTILINE) == [SUPPORTED_SGLANG]


def test_the_image_is_the_official_one_and_the_wheel() -> None:
    """The rules of a Dockerfile linter that matter here: pinned base, no cache, no root shell left behind."""
    image = (ROOT / "engine/Dockerfile").read_text()
    code = re.sub(r"\\\n", " ", "\n".join(line for line in image.splitlines() if not line.startswith("#")))
    instructions = [line.split(maxsplit=1) for line in code.splitlines() if line.strip()]
    assert [each[0] for each in instructions] == ["ARG", "FROM", "COPY", "RUN", "ENTRYPOINT"]
    assert instructions[1][1] == "lmsysorg/sglang:v${SGLANG_VERSION}"
    assert "--no-deps" in code
    assert "--no-cache-dir" in code
    assert instructions[4][1].startswith("[")

"""The plug-in runs in the engine's Python, 3.10 to 3.13, which need not be the one of the other parts."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "engine/src/kvrouting_sglang", ROOT / "core/src/kvrouting_core/eviction")
CODE = """
import sys
import kvrouting_sglang.leaf_set, kvrouting_sglang.node_store, kvrouting_sglang.pauses, kvrouting_sglang.plugin
from kvrouting_sglang.settings import EngineSettings
from kvrouting_core.eviction import make_policy
import random
for name in ("rlt", "lru", "lfu", "slru", "random", "rlt-adaptive"):
    make_policy(name, random.Random(1))
print(EngineSettings.from_environment({}).policy, sys.version_info[:2])
"""


def test_the_syntax_is_that_of_the_oldest_version() -> None:
    files = [file for folder in FOLDERS for file in folder.rglob("*.py")]
    assert len(files) > 15
    for file in files:
        ast.parse(file.read_text(), str(file), feature_version=(3, 10))


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_what_needs_no_engine_runs_in_each_version(minor: int) -> None:
    kept = sorted(Path(os.environ.get("PYENV_ROOT", "/nowhere")).glob(f"versions/3.{minor}.*/bin/python"))
    python = str(kept[-1]) if kept else shutil.which(f"python3.{minor}")
    if python is None:
        pytest.skip(f"no python3.{minor} on this machine")
    path = f"{ROOT / 'engine/src'}:{ROOT / 'core/src'}"
    done = subprocess.run(
        [python, "-c", CODE], env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split("\n")[0] == f"rlt-adaptive (3, {minor})", done.stderr

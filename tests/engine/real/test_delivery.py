"""The wheel in a folder on PYTHONPATH is enough, and moves none of SGLang's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[3]


def pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        check=True, cwd=ROOT, timeout=600,
    )  # fmt: skip


def installed() -> dict[str, str]:
    return {each.metadata["Name"]: each.version for each in distributions()}


def stock_python(folder: Path) -> Path:
    """An interpreter with the packages of this environment but for the project, which is in it by a .pth file: those
    of another environment's folder are not read."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "stock.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'tests/engine/cpu_stubs'}\n")
    return folder / "bin" / "python"


def test_a_target_folder_on_pythonpath_is_enough(tmp_path: Path) -> None:
    before = installed()
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("kvrouting-*.whl")
    pip("install", "--target", str(tmp_path / "plugin"), f"{wheel}[engine]")
    assert installed() == before
    folders = {each.name for each in (tmp_path / "plugin").iterdir() if not each.name.endswith(".dist-info")}
    assert not folders & {"torch", "zmq", "msgspec", "numpy", "sglang"}
    code = (
        "import json; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "import kvrouting_sglang.backend\n"
        "from sglang.srt.mem_cache.registry import registered_radix_cache_backends as names\n"
        "print(json.dumps([names(), kvrouting_sglang.__file__]))"
    )
    stock = str(stock_python(tmp_path / "stock"))
    without = subprocess.run(
        [stock, "-c", "import kvrouting_sglang"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert "No module named 'kvrouting_sglang'" in without.stderr
    done = subprocess.run(
        [stock, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "plugin")}, check=True,
    )  # fmt: skip
    names, found_at = json.loads(done.stdout.splitlines()[-1])
    assert "rlt" in names
    assert found_at.startswith(str(tmp_path))

"""`--class-file`: a GPU class that was measured here is what the router expects of its workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from kvrouting_core.class_file import MeasuredClass
from kvrouting_core.service_time import worker_class
from kvrouting_router.class_files import read_class_files
from kvrouting_router.command import router
from tests.fakes.fake_http_engine import running_engine
from tests.router.router_under_test import config, running_router
from tests.router.test_command import FREE, ready, running

TIMES = replace(worker_class("L40").times, prefill_ms_per_token=2.5)


def written(folder: Path, name: str, *, file: str = "class.json") -> Path:
    path = folder / file
    path.write_text(MeasuredClass(name=name, times=TIMES).as_text())
    return path


def test_classes_are_read_by_name_and_may_replace_a_built_in_one(tmp_path: Path) -> None:
    paths = [written(tmp_path, "L40", file="a"), written(tmp_path, "T4", file="b")]
    assert read_class_files(paths) == {"L40": TIMES, "T4": TIMES}


def test_files_that_are_no_class_or_say_the_same_are_named(tmp_path: Path) -> None:
    first, second = written(tmp_path, "T4", file="a"), written(tmp_path, "T4", file="b")
    with pytest.raises(ValueError, match=r"b and .*a both describe class 'T4': give one"):
        read_class_files([first, second])
    bad = tmp_path / "bad"
    bad.write_text("{}")
    with pytest.raises(ValueError, match="bad: is no worker class"):
        read_class_files([bad])
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="bad is no text in UTF-8"):
        read_class_files([bad])
    result = CliRunner().invoke(router, ["--model", "m", "--class-file", str(bad)])
    assert result.exit_code == 2
    assert "bad is no text" in result.output


def test_a_class_that_is_neither_built_in_nor_measured_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "T4")
    result = CliRunner().invoke(router, ["--model", "m", "--worker-class", "RTX9", "--class-file", str(path)])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "GPU class 'RTX9' is none of L40, L40-paper, L40S, H200," in said
    assert "T4: a measured one needs its --class-file" in said


async def test_a_sidecar_of_an_unknown_class_is_told_which_are_known() -> None:
    async with running_engine() as engine, running_router(config(class_times={"a10g": TIMES})) as under_test:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await under_test.sidecar(engine, gpu_class="RTX9")
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        said = error.value.details() or ""
        assert said.startswith("GPU class 'RTX9' is none of L40, ")
        assert "a10g" in said
        assert await under_test.metric("handshakes_refused_total", reason="gpu_class") == 1
        await under_test.sidecar(engine, gpu_class="a10g")
        await under_test.sidecar(engine, gpu_class="", pod_uid="pod-b")


async def test_a_worker_of_the_class_is_expected_to_be_as_slow_as_it_says(tmp_path: Path) -> None:
    path = written(tmp_path, "T4")
    async with running_engine() as engine:
        options = ["--model", "m", "--worker", engine.url, *FREE]
        believed = []
        for more in ([], ["--worker-class", "T4", "--class-file", str(path)]):
            async with running([*options, *more]) as (_, ports), aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{ports['http']}"
                await ready(session, url)
                async with session.get(url + "/workers") as response:
                    (view,) = (await response.json())["workers"]
                believed.append(view["beliefs"]["prefill_ms_per_token"])
    assert believed == [worker_class("L40").times.prefill_ms_per_token, 2.5]

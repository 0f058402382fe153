"""`kvrouting judge-estimator`: a simulation with every prediction kept, and what became of them."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from kvrouting_simulator.estimator_study.cases import CASES
from kvrouting_simulator.estimator_study.judgement import accuracy, regret
from kvrouting_simulator.estimator_study.page import Judged, page
from kvrouting_simulator.estimator_study.recorded_run import recorded

_REQUESTS, _SAMPLES, _SEED = 400, 24, 1


@click.command("judge-estimator", context_settings={"show_default": True})
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The page, Markdown.  [default: printed]")
@click.option("--requests", type=click.IntRange(min=20), default=_REQUESTS, help="Of each case.")
@click.option("--samples", type=click.IntRange(min=1), default=_SAMPLES, help="Requests whose regret is computed.")
@click.option("--seed", type=click.IntRange(min=0), default=_SEED)
def judge_command(out: Path | None, requests: int, samples: int, seed: int) -> None:
    """Judge lbgr's predictions: error, bias, calibration, and regret against the best worker in hindsight.

    Each sampled request costs a simulation for every other worker; the default takes about three minutes.
    """
    console = Console(stderr=True)
    judged: list[Judged] = []
    for case in CASES:
        console.print(f"{case.name}", highlight=False)
        run = recorded(case.scenario(requests=requests, seed=seed))
        judged.append((case, accuracy(run), regret(run, samples=samples)))
    given = {"requests": (requests, _REQUESTS), "samples": (samples, _SAMPLES), "seed": (seed, _SEED)}
    options = [f"--{name} {value}" for name, (value, usual) in given.items() if value != usual]
    command = " ".join(["kvrouting judge-estimator", *options])
    text = page(judged, command=command, requests=requests, samples=samples, seed=seed)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{out} cannot be written: {error}") from error
    console.print(f"wrote {out}", markup=False, highlight=False)

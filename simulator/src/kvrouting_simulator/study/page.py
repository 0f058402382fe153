"""A study's page in Markdown: what was asked, what the paper claims, what the runs say, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouting_simulator.experiment.memory import SET_UPS, USUAL_FRACTION
from kvrouting_simulator.study.definition import Claim, ClaimForm
from kvrouting_simulator.study.evidence import Evidence, Spread
from kvrouting_simulator.study.figures import FIGURES, MEASURED, SHOWN
from kvrouting_simulator.study.wording import filled

_SUFFIX: Mapping[ClaimForm, str] = {"ratio": "x", "percent": " %", "difference": "", "value": ""}


def claim_numbers(evidence: Evidence) -> dict[str, str]:
    """The number of each claim of the study as text, by name."""
    return {claim.name: _number(claim, evidence.judge(claim)) for claim in evidence.study.claims}


def _number(claim: Claim, found: Spread) -> str:
    unit = FIGURES[claim.figure].unit if claim.form in ("difference", "value") else ""
    return f"{found.text(claim.decimals)}{_SUFFIX[claim.form]}{' ' + unit if unit else ''}"


def study_page(evidence: Evidence, *, command: str, has_times: bool) -> str:
    """The whole page. command: what makes it again."""
    study = evidence.study
    numbers = claim_numbers(evidence)
    seeds = ", ".join(map(str, study.seeds))
    parts = [
        f"# {study.title}",
        filled(study.about.strip(), numbers),
        *_claims(evidence, numbers),
        _memory(study.memory),
        f"![{study.title}]({study.name}.png)",
        "## Numbers",
        f"Mean ± standard deviation over the seeds {seeds}; each seed gives every row the same prompts at the same "
        f"times{_size(study.requests)}. Every run: [{study.name}.csv]({study.name}.csv)"
        + (f", times of one machine: [{study.name}-times.csv]({study.name}-times.csv)." if has_times else "."),
        _numbers(evidence),
        "## Made by",
        f"`{command}` from `experiments/{study.name}.toml`. Texts are written there; the command puts in every number.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _size(requests: int | None) -> str:
    return "" if requests is None else f", the first {requests} of the workload"


def _claims(evidence: Evidence, numbers: Mapping[str, str]) -> Sequence[str]:
    study = evidence.study
    parts = ["## The paper and these runs"]
    if study.paper:
        parts.append(f"The paper: {study.paper.strip()}")
    if study.claims:
        rows = [(claim.says, claim.paper or "–", numbers[claim.name]) for claim in study.claims]
        parts.append(_table(("", "paper", "here"), rows))
    if study.explanation:
        parts.append(filled(study.explanation.strip(), numbers))
    return parts if len(parts) > 1 else []


def _memory(names: Sequence[str]) -> str:
    """What fits: memory at the usual fraction, weights, and the tokens of KV cache that are left."""
    rows = []
    for set_up in (SET_UPS[name] for name in names):
        tokens = set_up.kv_tokens(USUAL_FRACTION)
        left = f"{tokens // 1000}k" if tokens > 0 else "does not start"
        memory = f"{USUAL_FRACTION * set_up.cards_gib:.0f}"
        rows.append((set_up.model, set_up.cards, memory, f"{set_up.weights_gib:.0f}", left))
    header = (
        "model",
        "cards of a worker",
        f"memory at fraction {USUAL_FRACTION} [GiB]",
        "weights [GiB]",
        "KV cache [tokens]",
    )
    return _table(header, rows) if rows else ""


def _numbers(evidence: Evidence) -> str:
    study = evidence.study
    names = ("capacity_per_s", *SHOWN, *MEASURED)
    places = evidence.places()
    shown = [name for name in names if any(evidence.spread(labels, name) is not None for labels in places)]
    header = [*(axis.name for axis in study.axes), *(FIGURES[name].heading for name in shown)]
    rows = [
        [*(labels[axis.name] for axis in study.axes), *(_cell(evidence.spread(labels, name), name) for name in shown)]
        for labels in places
    ]
    return _table(header, rows)


def _cell(found: Spread | None, name: str) -> str:
    return "–" if found is None else found.text(FIGURES[name].decimals)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line(header), _line(["---"] * len(header)), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

"""How long a match must be before what followed it is worth drafting.

    python scripts/measure_copying.py DATA_FOLDER --out results/control/copying.json

Goes through greedy answers of a target (`leadout data`) as an engine would that drafts nothing but
copies of a request's own text: for each least match, how many of its steps have a copy to offer,
and how many of the K tokens offered then stand. There is no engine and no drafter: the texts are
the target's own, so a draft stands where it is what the text says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from leadout.control.prompt_lookup import CopyIndex
from leadout.provenance import Provenance
from leadout.shards import Sample

MATCHES = (1, 2, 3, 4, 5, 6, 8)
K = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    samples = list(islice(read(arguments.data), arguments.samples))
    sources = sorted({sample.source for sample in samples})
    found = {}
    for match in track(MATCHES, description="least match"):
        counts = {source: [0, 0, 0] for source in sources}
        for sample in samples:
            for place, value in enumerate(copied(sample, match)):
                counts[sample.source][place] += value
        total = [sum(each) for each in zip(*counts.values(), strict=True)]
        found[match] = {"all": told(total)} | {name: told(each) for name, each in counts.items()}
    result = {
        "provenance": Provenance.of_this_run().model_dump(),
        "samples": len(samples),
        "k": K,
        "by_match": found,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    show(found)


def read(folder: Path) -> Iterable[Sample]:
    for path in sorted(folder.glob("samples-*.jsonl")):
        with path.open() as lines:
            for line in lines:
                sample = Sample.model_validate_json(line)
                if sample.temperature == 0:
                    yield sample


def copied(sample: Sample, match: int) -> tuple[int, int, int]:
    """Steps that the answer takes, those with a copy to offer, and the tokens that stood."""
    text = [*sample.prompt, *sample.response]
    index, place = CopyIndex(match), len(sample.prompt)
    steps = offers = stood = 0
    while place < len(text):
        draft = index.continuation(text[:place], K)
        steps += 1
        accepted = 0
        while (
            accepted < len(draft)
            and place + accepted < len(text) - 1
            and draft[accepted] == text[place + accepted]
        ):
            accepted += 1
        offers += bool(draft)
        stood += accepted
        place += accepted + 1
    return steps, offers, stood


def told(counts: list[int]) -> dict[str, float]:
    steps, offers, stood = counts
    return {
        "steps": steps,
        "offered": round(offers / steps, 4),
        "stood_per_offer": round(stood / max(1, offers), 3),
        "tokens_per_step": round(1 + stood / steps, 3),
    }


def show(found: dict[int, Any]) -> None:
    table = Table(title=f"copies of up to {K} tokens")
    for name in ("least match", "steps with one", "stood of it", "tokens per step"):
        table.add_column(name, justify="right")
    for match, by_source in found.items():
        row = by_source["all"]
        table.add_row(
            str(match),
            f"{100 * row['offered']:.1f}%",
            f"{row['stood_per_offer']:.2f}",
            f"{row['tokens_per_step']:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

"""What a bench leaves in its folder: the result as JSON and CSV, a page, and a picture."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from leadout.bench.charts import picture
from leadout.bench.page import page
from leadout.bench.result import BenchResult, CellResult
from leadout.checkpoints.store import replacing

RESULTS, TABLE, REPORT, PICTURE = "results.json", "results.csv", "report.html", "speedup.svg"


def write_files(result: BenchResult, folder: Path) -> list[Path]:
    texts = {
        RESULTS: result.model_dump_json(indent=1) + "\n",
        TABLE: _csv(result),
        REPORT: page(result),
    }
    if result.geometric_means:
        texts[PICTURE] = picture(result)
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _csv(result: BenchResult) -> str:
    rows = [_row(cell) for cell in result.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(cell: CellResult) -> dict[str, object]:
    spread = cell.speedup_spread
    interval = (None, None) if spread is None or spread.interval is None else spread.interval
    return {
        "prompt_set": cell.prompt_set,
        "concurrency": cell.concurrency,
        "arm": cell.arm,
        "rounds": len(cell.rounds),
        "tokens_per_second": cell.tokens_per_second.median,
        "tokens_per_second_low": cell.tokens_per_second.low,
        "tokens_per_second_high": cell.tokens_per_second.high,
        "speedup": cell.speedup,
        "speedup_low": None if spread is None else spread.low,
        "speedup_high": None if spread is None else spread.high,
        "speedup_95_low": interval[0],
        "speedup_95_high": interval[1],
        "acceptance_length": cell.acceptance_length,
        "predicted_speedup": cell.predicted_speedup,
        "ttft_ms": cell.ttft.median,
        "ttft_p99_ms": cell.ttft.p99,
        "tpot_ms": cell.tpot.median,
        "tpot_p99_ms": cell.tpot.p99,
        "itl_ms": cell.itl.median,
        "itl_p99_ms": cell.itl.p99,
    }

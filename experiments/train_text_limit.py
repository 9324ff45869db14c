"""Whether text limits a training run: acceptance on held-out answers and on those trained on.

    python experiments/train_text_limit.py DATA RUN

RUN is the folder of a run of `leadout train` on DATA that continued the shipped drafter, finished
or not: its log has the acceptance on both kinds of answers. Where the two drift apart, the drafter
learns the answers by heart. Writes results/train/text_limit.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import ROOT, SHIPPED, write_result
from leadout.data.manifest import DataFolder
from leadout.train.config import TrainConfig
from leadout.train.progress import curves_of, read_log

RESULT = ROOT / "results" / "train" / "text_limit.json"
AROUND = 50  # steps over which the acceptance on training answers is averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    arguments = parser.parse_args()
    config = TrainConfig.resolve({}, arguments.run / "training.yaml")
    data = DataFolder(arguments.data)
    result = {
        # No folder of this machine.
        "settings": config.model_dump(mode="json") | {"initial": Path(config.initial).name},
        "answers": len(data.samples()),
        "response_tokens": data.response_tokens,
        "curve": curve(arguments.run / "run", config),
    }
    write_result(RESULT, result, drafter=SHIPPED)


def curve(run: Path, config: TrainConfig) -> list[dict[str, float]]:
    """At each validation: acceptance at every position of held-out and of training answers."""
    curves = curves_of(read_log(run))
    hits = {record.step: record.drafts_hit for record in curves.steps}
    found = []
    for record in curves.validations:
        near = [hits[step] for step in hits if record.step - AROUND < step <= record.step]
        found.append(
            {
                "step": record.step,
                "blocks": record.step * config.batch_sequences * config.anchors,
                "held_out": record.validation.overall.every_position,
                "held_out_along_decoding": record.validation.overall.acceptance_length,
                "trained_on": sum(near) / len(near),
            }
        )
    return found


if __name__ == "__main__":
    main()

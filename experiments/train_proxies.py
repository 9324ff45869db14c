"""Short training runs of SmolLM2 drafters that differ in one setting each: which recipe is better?

    python experiments/train_proxies.py TARGET DATA WORK
    python experiments/train_proxies.py TARGET DATA WORK --seeds 1 --arms baseline walk
    python experiments/train_proxies.py --tiny WORK

DATA is a folder with answers of the target, as `experiments/train_smollm2.py` makes it. Every arm
starts from random weights, has its whole schedule of learning rates, and trains the same number of
blocks on one thread; all arms have the same samples, unless they are about samples. Held-out
acceptance is counted along decoding, on greedy answers, with the weights of the last step.
Differences to the baseline are paired by text and pooled over the seeds that both have, with 95%
intervals over texts. Repeat arms that win, and the baseline, with `--seeds 1`: intervals over texts
do not contain the noise of initial weights and anchors.

One call runs one arm after the other, those of which most is expected first. Start the same command
a second time to use a second core: each call takes arms that no other call has. An interrupted arm
continues from its last checkpoint. Half an hour to an hour for each arm on a core; the target's
states are computed first, by all calls together, and kept in WORK (5 GB; arms with other taps have
their own, which can be deleted afterwards). Writes results/train/proxies.json after every arm. With
`--tiny` the target is the tiny random model of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

from common import ROOT, write_result
from leadout.data.manifest import DataFolder
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Target
from leadout.evaluate.acceptance import (
    AcceptedDrafts,
    Validation,
    accepted_drafts,
    along_decoding,
    summarise,
)
from leadout.evaluate.blocks import BlockForward, to_sequence
from leadout.evaluate.hidden_states import ComputedStates, StatesOnDisk, load_model
from leadout.evaluate.ranks import ALONE
from leadout.files import Timeout, lock, write_text
from leadout.pairing import read_sizes, read_target
from leadout.stats import bootstrap, ratio_interval
from leadout.train import run as run_module
from leadout.train.budget import with_steps
from leadout.train.config import TrainConfig
from leadout.train.init import new_drafter
from leadout.train.progress import Record, StepRecord
from leadout.train.run import Corpus, Run, complete_settings, evenly_spaced, read_corpus

RESULT = ROOT / "results" / "train" / "proxies.json"
BASELINE = "baseline"
BLOCKS = 300_000
SAMPLES = 2400  # with 32 blocks each, 300,000 blocks are four passes: as in the long runs
HELD_OUT = 200
STATES_DTYPE = torch.bfloat16  # as the target is served; half the disk of float32
NEVER = 10**9
COMMON: dict[str, Any] = {  # the recipe of the shipped drafter
    "layers": 2,
    "block_size": 8,
    "mask_token_id": 7,
    "candidates": 8192,
    "max_length": 384,
    "anchors": 32,
    "batch_sequences": 32,
    "learning_rate": 0.004,
    "validation_sequences": HELD_OUT,
    "states": "compute",  # the script keeps them, for all arms together
    "validate_every": NEVER,  # but after the last step
    "save_every": 25,
}
TINY: dict[str, Any] = {
    "mask_token_id": None,
    "candidates": None,
    "max_length": 64,
    "anchors": 4,
    "batch_sequences": 8,
    "validation_sequences": 6,
}


TINY_SAMPLES, TINY_BLOCKS = 16, 640


@dataclass(frozen=True)
class Arm:
    """What differs from the baseline."""

    changes: dict[str, Any] = field(default_factory=dict)  # settings
    blocks: float = 1.0  # times the blocks of the baseline
    samples: float = 1.0  # times its samples
    greedy_only: bool = False
    learned_mask: bool = False


ARMS = {
    BASELINE: Arm(),
    # Depth; a deeper drafter may want another rate.
    "3 layers": Arm({"layers": 3}),
    "4 layers": Arm({"layers": 4}),
    "4 layers, learning rate 0.008": Arm({"layers": 4, "learning_rate": 0.008}),
    # Where blocks start, and how long they are.
    "walk": Arm({"walk_share": 0.5}),
    "short blocks first": Arm({"first_block_size": 5}),
    # Learning rate and batch.
    "learning rate 0.002": Arm({"learning_rate": 0.002}),
    "learning rate 0.008": Arm({"learning_rate": 0.008}),
    "learning rate 0.012": Arm({"learning_rate": 0.012}),
    "half the batch": Arm({"batch_sequences": 16}),
    "a quarter of the batch": Arm({"batch_sequences": 8}),
    "an eighth of the batch": Arm({"batch_sequences": 4}),
    "half the batch, learning rate 0.008": Arm({"batch_sequences": 16, "learning_rate": 0.008}),
    "64 blocks of half as many sequences": Arm({"batch_sequences": 16, "anchors": 64}),
    # What limits: steps, or text?
    "twice the blocks": Arm(blocks=2),
    "twice the text": Arm(samples=2),
    # Labels.
    "hard labels": Arm({"distillation": 0.0}),
    "soft labels": Arm({"distillation": 1.0}),
    "greedy text only": Arm(greedy_only=True),
    "loss over the whole vocabulary": Arm({"candidates": None}),
    # What the drafter reads.
    "learned mask vector": Arm(learned_mask=True),
    "mask token 5": Arm({"mask_token_id": 5}),
    "taps up to the last layer": Arm({"target_layer_ids": (1, 8, 15, 22, 29)}),
    "8 taps": Arm({"target_layer_ids": (1, 5, 8, 12, 16, 20, 23, 27)}),
    # Regularization.
    "weight decay 0.1": Arm({"weight_decay": 0.1}),
}
# Whose token ids and layers the tiny target does not have.
NOT_TINY = ("mask token 5", "taps up to the last layer", "8 taps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), metavar="ARM", default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="to train on")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        default="float32",
        help="bfloat16 is faster where the processor has instructions for it",
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny random target")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if len(arguments.folders) != (1 if arguments.tiny else 3):
        parser.error("name a target, a data folder and a work folder, or --tiny and a work folder")
    if arguments.tiny:
        arguments.samples, arguments.blocks = TINY_SAMPLES, TINY_BLOCKS
    *models, work = arguments.folders
    target, data = write_tiny(work) if arguments.tiny else models
    out = arguments.out or (work / "proxies.json" if arguments.tiny else RESULT)
    proxies = Proxies(target, data, work, arguments)
    for seed in arguments.seeds:
        for name in arguments.arms:
            if not (arguments.tiny and name in NOT_TINY):
                proxies.run(name, seed, out)


def write_tiny(work: Path) -> tuple[Path, Path]:
    from support.tiny_data import write_predictable_target, write_tiny_data

    target, data = work / "target", work / "data"
    if not data.exists():
        write_tiny_data(data, write_predictable_target(target))
    return target, data


class Proxies:
    def __init__(self, target: Path, data: Path, work: Path, arguments: Any) -> None:
        self._target, self._work, self._arguments = target, work, arguments
        (work / "arms").mkdir(parents=True, exist_ok=True)
        vocab_size = read_target(target).vocab_size
        self._settings = COMMON | (TINY if arguments.tiny else {})
        self._settings["precision"] = arguments.precision
        config = TrainConfig(**self._settings)
        corpus = read_corpus(DataFolder(data), target, config, vocab_size)
        self._corpus = corpus
        self._common = complete_settings(config, target, corpus, vocab_size)
        # What must be the same in all arms of a table.
        self._same = {
            "settings": self._common.model_dump(exclude={"seed", "epochs"}, mode="json"),
            "blocks": arguments.blocks,
            "samples": arguments.samples,
            "data_hash": corpus.content_hash,
        }

    def run(self, name: str, seed: int, out: Path) -> None:
        """Train an arm and write the table, unless the arm is done or another call has it."""
        folder = self._work / "arms" / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
        folder.mkdir(exist_ok=True)
        try:
            with lock(folder / "lock", seconds=0):
                if not (folder / "result.json").exists():
                    corpus = self._corpus_of(ARMS[name])
                    if corpus is None:
                        print(f"{name}: the data has too few samples for it")
                        return
                    result = self._train(ARMS[name], corpus, seed, folder)
                    record = {"arm": name, "seed": seed, "same": self._same, **result}
                    write_text(folder / "result.json", json.dumps(record) + "\n")
        except Timeout:
            return
        with lock(self._work / "table.lock"):
            write_result(out, table(self._work, self._same), target=self._target)

    def _train(self, arm: Arm, corpus: Corpus, seed: int, folder: Path) -> dict[str, Any]:
        config = self._common.model_copy(update={**arm.changes, "seed": seed})
        per_step = config.batch_sequences * config.anchors
        steps = max(1, round(arm.blocks * self._arguments.blocks / per_step))
        config = with_steps(config, corpus, steps, 1)
        config = config.model_copy(update={"validate_every": NEVER})
        source = self._states(corpus, config)
        chosen = mock.patch.object(run_module, "new_drafter", drafter_with_learned_mask)
        with chosen if arm.learned_mask else nullcontext():
            run = ProxyRun(self._target, corpus, config, folder, ALONE, states=source)
        losses: list[float] = []

        def listen(record: Record) -> None:
            if isinstance(record, StepRecord):
                losses.append(record.loss)
                if record.step % 20 == 0:
                    print(f"{folder.name}: step {record.step} of {steps}", flush=True)

        began, wall = time.process_time(), time.monotonic()
        run.train(listen)
        processor = time.process_time() - began - run.seconds_validating
        minutes = (time.monotonic() - wall) / 60
        if run.drafts is None:  # it was trained to its end by an earlier call
            run.validate()
        assert run.drafts is not None
        validation = summarise(run.drafts, config.block_size)
        by_text = [along_decoding(each.counts) for each in run.drafts]
        return {
            "changes": {**arm.changes, **differences(arm)},
            "steps": steps,
            "blocks": steps * per_step,
            "parameters": sum(p.numel() for p in run.drafter.parameters()),
            # Of the steps of this process: an interrupted arm was trained by several.
            "processor_ms_per_block": 1e3 * processor / max(1, len(losses)) / per_step,
            "minutes": minutes,
            "final_loss": float(np.mean(losses[-10:])) if losses else None,
            "every_position": validation.overall.every_position,
            "by_position": validation.overall.by_position,
            "by_source": {
                source: each.acceptance_length for source, each in validation.by_source.items()
            },
            "accepted_by_text": [sum(steps) for steps in by_text],
            "steps_by_text": [len(steps) for steps in by_text],
        }

    def _corpus_of(self, arm: Arm) -> Corpus | None:
        """The data with the samples of an arm; None if there are too few."""
        corpus, train = self._corpus, self._corpus.split.train
        if arm.greedy_only:
            train = [each for each in train if corpus.samples.facts[each].temperature == 0]
        count = round(arm.samples * self._arguments.samples)
        if len(train) < count:
            return None
        return replace(corpus, split=corpus.split._replace(train=evenly_spaced(train, count)))

    def _states(self, corpus: Corpus, config: TrainConfig) -> StatesOnDisk:
        """The states of all samples of an arm, in a file that arms with the same taps share."""
        taps = config.target_layer_ids
        assert taps is not None
        precision: torch.dtype = getattr(torch, config.precision)
        source = StatesOnDisk(
            self._work / f"states-{'-'.join(map(str, taps))}.bin",
            ComputedStates(lambda: Target(load_model(self._target, precision), taps)),
            corpus.lengths,
            taps=len(taps),
            hidden_size=read_sizes(self._target).hidden_size,
            dtype=STATES_DTYPE,
        )
        source.require_room()
        needed = [*corpus.split.train, *corpus.split.validation]
        # A second call starts at the other end, and both meet.
        first = lock(self._work / "states.lock", seconds=0)
        try:
            first.acquire()
        except Timeout:
            needed.reverse()
        for number, index in enumerate(needed):
            source.fill([(index, to_sequence(corpus.samples[index], config.max_length))])
            if number % 100 == 0:
                print(f"states: {number} of {len(needed)}", flush=True)
        first.release()
        return source


class ProxyRun(Run):
    """A run that keeps the drafts of its validation for each text."""

    drafts: list[AcceptedDrafts] | None = None
    seconds_validating = 0.0

    def validate(self) -> Validation:
        began = time.process_time()
        items = [self.fetch(index) for index in self.corpus.split.validation]
        forward = BlockForward(self.drafter, self.target_weights.embedding)
        size = self.config.block_size
        self.drafts = accepted_drafts(forward, self.draft_head, self.source, items, size)
        self.seconds_validating = time.process_time() - began
        return summarise(self.drafts, size)


class DrafterWithLearnedMask(Drafter):
    """The mask token's embedding is trained; vLLM reads one from a file, `Drafter` does not yet."""

    mask_offset: nn.Parameter  # from the target's row

    def embed(self, token_ids: Tensor, target_embedding: Tensor) -> Tensor:
        is_mask = (token_ids == self.config.mask_token_id)[..., None]
        return super().embed(token_ids, target_embedding) + is_mask * self.mask_offset


def drafter_with_learned_mask(config: DrafterConfig, seed: int) -> Drafter:
    drafter = new_drafter(config, seed)
    drafter.__class__ = DrafterWithLearnedMask
    drafter.mask_offset = nn.Parameter(torch.zeros(config.hidden_size))
    return drafter


def differences(arm: Arm) -> dict[str, Any]:
    """What an arm changes beside settings."""
    plain = Arm()
    names = ("blocks", "samples", "greedy_only", "learned_mask")
    found = {name: getattr(arm, name) for name in names}
    return {name: each for name, each in found.items() if each != getattr(plain, name)}


def table(work: Path, same: dict[str, Any]) -> dict[str, Any]:
    """All arms that are done, each compared with the baseline."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted((work / "arms").glob("*/result.json")):
        record = json.loads(path.read_text())
        if record["same"] != same:
            raise SystemExit(f"{path} was made with other settings; use another work folder")
        found.setdefault(record["arm"], {})[record["seed"]] = record
    baseline = found.get(BASELINE, {})
    texts = len(next(iter(next(iter(found.values())).values()))["steps_by_text"])
    return {
        "threads": torch.get_num_threads(),
        "settings": same["settings"],
        "blocks": same["blocks"],
        "samples": same["samples"],
        "data_hash": same["data_hash"],
        "held_out_texts": texts,
        "arms": {
            name: {
                "changes": next(iter(found[name].values()))["changes"],
                "seeds": {str(seed): row(each) for seed, each in sorted(found[name].items())},
                **gain_of(baseline, found[name]),
            }
            for name in ARMS
            if name in found
        },
    }


def row(record: dict[str, Any]) -> dict[str, Any]:
    accepted, steps = (np.array(record[key], dtype=np.float64) for key in TEXT_COLUMNS)
    length = ratio_interval(accepted, steps).plus(1).model_dump()
    hidden = ("arm", "seed", "same", "changes", *TEXT_COLUMNS)
    return {
        "acceptance_length": length,
        **{key: each for key, each in record.items() if key not in hidden},
    }


TEXT_COLUMNS = ("accepted_by_text", "steps_by_text")


def gain_of(baseline: dict[int, dict[str, Any]], arm: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """An arm's acceptance length less the baseline's, over the seeds that both have."""
    seeds = [seed for seed in arm if seed in baseline]
    if not seeds or arm is baseline:
        return {}

    def summed(records: dict[int, dict[str, Any]], key: str) -> Any:
        return np.array([records[seed][key] for seed in seeds], dtype=np.float64).sum(0)  # [texts]

    sums = [[summed(records, key) for key in TEXT_COLUMNS] for records in (arm, baseline)]

    def difference(drawn: Any) -> Any:
        (own, own_steps), (base, base_steps) = ([each[drawn].sum(-1) for each in s] for s in sums)
        return own / np.maximum(own_steps, 1) - base / np.maximum(base_steps, 1)

    by_seed = [length(arm[seed]) - length(baseline[seed]) for seed in seeds]
    cost = [
        sum(records[seed]["processor_ms_per_block"] for seed in seeds)
        for records in (arm, baseline)
    ]
    return {
        "gain": bootstrap(len(sums[0][0]), difference).model_dump(),
        "gain_by_seed": dict(zip(map(str, seeds), by_seed, strict=True)),
        "times_the_processor_time_per_block": cost[0] / cost[1],
    }


def length(record: dict[str, Sequence[float]]) -> float:
    return 1 + sum(record["accepted_by_text"]) / max(1, sum(record["steps_by_text"]))


if __name__ == "__main__":
    main()

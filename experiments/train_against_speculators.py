"""Compare Leadout's trainer with that of speculators: same samples, blocks, layers and seeds.

    python experiments/train_against_speculators.py TARGET DATA_FOLDER --out FILE
    python experiments/train_against_speculators.py --tiny --out FILE

With `--tiny` the target is the tiny random model of the tests, which answers random prompts.
Needs `pip install --no-deps speculators==0.9.0`; its pins exclude the newest versions of some
dependencies. Both trainers keep their own defaults for everything that is not made equal here: the
optimizer is Muon for both, and the learning rate that of the shipped drafter's recipe. All drafters
start from scratch, with several seeds, and are validated after the last step. What FILE already
contains is not trained again.

The peer (speculators) runs through its own command's `main`, unchanged, with its options for
machines without a GPU: sdpa attention, eager losses, no loader processes. Two things that it does
not support on CPUs are replaced from outside: see `SpeculatorsOnCpu` and
`torch.accelerator.synchronize` below.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import save_file

from common import link_states, provenance
from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.data.manifest import DataFolder
from leadout.dflash.target import Observation, Target
from leadout.evaluate.acceptance import accepted_drafts, along_decoding, summarise
from leadout.evaluate.blocks import BlockForward, Split, possible_anchors, to_sequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed, StatesOnDisk, StateSource
from leadout.evaluate.ranks import Ranks
from leadout.pairing import read_target
from leadout.stats import Floats, bootstrap, ratio_interval
from leadout.train.config import TrainConfig
from leadout.train.loop import sequences_of_step
from leadout.train.progress import Record, StepRecord
from leadout.train.run import STATES, WORK, Corpus, Run, complete_settings, read_corpus
from leadout.train.state import load_best
from leadout.version import installed_version

LAYERS = 2
BLOCK_SIZE = 8
MASK_TOKEN = 7
MAX_LENGTH = 384
LEARNING_RATE = 0.004
ANCHORS = 16  # blocks per sequence and step; the peer draws as many per row of packed sequences
HELD_OUT = 40
PRECISION = torch.float32
TINY_PROMPTS, TINY_TOKENS, TINY_MASK_TOKEN = 400, 64, 319
OURS, PEER = "leadout", "speculators"

Arm = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true", help="a tiny random target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=300, help="samples to train on")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sequences", type=int, default=8, help="sequences per step")
    parser.add_argument(
        "--held-out", type=int, default=HELD_OUT, help="greedy answers to validate on"
    )
    parser.add_argument(
        "--work", type=Path, help="new folder in which states and drafters are kept"
    )
    arguments = parser.parse_args()
    if arguments.work is not None and arguments.work.exists():
        parser.error(f"--work {arguments.work} exists already; name a new folder")
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.tiny:
            arguments.target, arguments.data = write_tiny(work)
        elif arguments.data is None:
            parser.error("name a target and a data folder, or --tiny")
        compare(arguments, work)


def write_tiny(work: Path) -> tuple[Path, Path]:
    """The tiny target and its answers."""
    from support.tiny_data import write_predictable_target, write_tiny_data

    target = write_predictable_target(work / "target")
    return target, write_tiny_data(
        work / "data", target, prompts=TINY_PROMPTS, new_tokens=TINY_TOKENS
    ).folder


def compare(arguments: Any, work: Path) -> None:
    run, seconds_for_states = prepare(arguments, work)
    arms = arms_before(arguments.out, same_for_all(run))
    for seed in arguments.seeds:
        config = run.config.model_copy(update={"seed": seed})
        trainings: dict[str, Callable[[Path], tuple[Arm, Path]]] = {
            OURS: partial(train_ours, run, config, arguments.target),
            PEER: partial(train_peer, run, config, arguments.target, work),
        }
        for name, train in trainings.items():
            if str(seed) in arms[name]:
                continue
            arm, drafter = train(work / f"{name}-{seed}")
            arms[name][str(seed)] = arm | validate(run, drafter)
            result = {
                "provenance": provenance(target=arguments.target),
                "speculators": installed_version("speculators"),
                "threads": torch.get_num_threads(),
                "data_hash": run.corpus.content_hash,
                "target": "tiny random model" if arguments.tiny else arguments.target.name,
                "same": same_for_all(run),
                "minutes_for_states": seconds_for_states / 60,
                "arms": arms,
                **difference_of(arms[OURS], arms[PEER]),
            }
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
            length = arms[name][str(seed)]["acceptance_length"]["value"]
            print(f"{name:12} seed {seed}: acceptance length {length:.3f}", flush=True)


def difference_of(ours: dict[str, Arm], theirs: dict[str, Arm]) -> dict[str, Any]:
    """Ours against theirs over the seeds that both have, with intervals over the held-out texts."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return {}

    def summed(arms: dict[str, Arm], part: str) -> Floats:
        return np.array([arms[seed][part] for seed in seeds], dtype=np.float64).sum(0)  # [texts]

    def length(arms: dict[str, Arm], drawn: Any) -> Any:
        steps = summed(arms, "steps_by_text")[drawn].sum(-1)
        return 1 + summed(arms, "accepted_by_text")[drawn].sum(-1) / np.maximum(steps, 1)

    texts = len(summed(ours, "steps_by_text"))
    found = bootstrap(texts, lambda drawn: length(ours, drawn) - length(theirs, drawn))
    by_seed = {
        seed: ours[seed]["acceptance_length"]["value"] - theirs[seed]["acceptance_length"]["value"]
        for seed in seeds
    }
    minutes = [sum(arms[s]["processor_minutes"] for s in seeds) for arms in (ours, theirs)]
    return {
        "difference": {"acceptance_length": found.model_dump(), "by_seed": by_seed},
        "processor_time_ratio": minutes[0] / minutes[1],
    }


def arms_before(out: Path, same: dict[str, Any]) -> dict[str, dict[str, Arm]]:
    """The arms of an earlier call by trainer and seed."""
    if not out.exists():
        return {OURS: {}, PEER: {}}
    before = json.loads(out.read_text())
    if before["same"] != same:
        raise SystemExit(f"--out {out} contains arms with other settings; name another file")
    arms: dict[str, dict[str, Arm]] = before["arms"]
    return arms


def prepare(arguments: Any, work: Path) -> tuple[Run, float]:
    """Our run with the chosen samples, and their states on disk for both trainers."""
    requested = TrainConfig(
        layers=LAYERS,
        block_size=BLOCK_SIZE,
        mask_token_id=TINY_MASK_TOKEN if arguments.tiny else MASK_TOKEN,
        max_length=MAX_LENGTH,
        anchors=ANCHORS,
        learning_rate=LEARNING_RATE,
        precision="float32",
        batch_sequences=arguments.sequences,
        validation_sequences=arguments.held_out,
        epochs=arguments.steps * arguments.sequences / arguments.samples,
        validate_every=arguments.steps,
        save_every=arguments.steps,
        states="disk",
    )
    vocab_size = read_target(arguments.target).vocab_size
    corpus = read_corpus(DataFolder(arguments.data), arguments.target, requested, vocab_size)
    corpus = replace(corpus, split=fewer(corpus.split, arguments.samples))
    config = complete_settings(requested, arguments.target, corpus, vocab_size)
    began = time.monotonic()
    compute_states(arguments.target, corpus, config, work)
    seconds = time.monotonic() - began
    ranks = Ranks(0, 1, torch.device("cpu"))
    return Run(arguments.target, corpus, config, work / "states", ranks), seconds


def fewer(split: Split, count: int) -> Split:
    """`count` training samples, evenly spread."""
    if count > len(split.train):
        raise SystemExit(f"--samples {count}: at most {len(split.train)} are available")
    chosen = [split.train[place * len(split.train) // count] for place in range(count)]
    return Split(chosen, split.validation)


def same_for_all(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "layers": config.layers,
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids or ()),
        "mask_token_id": config.mask_token_id,
        "max_length": config.max_length,
        "learning_rate": config.learning_rate,
        "precision": config.precision,
        "steps": run.steps,
        "sequences_per_step": config.batch_sequences,
        "blocks_per_step": config.batch_sequences * config.anchors,
        "train_samples": len(run.corpus.split.train),
        "held_out_samples": len(run.corpus.split.validation),
    }


# States, computed once


class StatesForBoth:
    """A target pass that also writes the files that the peer reads.

    The peer's teacher is the output of the last layer before the final norm; ours is after it.
    """

    def __init__(
        self, target: Path, layer_ids: tuple[int, ...], rows: dict[int, int], folder: Path
    ) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=PRECISION)
        last = model.config.get_text_config().num_hidden_layers - 1
        every = layer_ids if last in layer_ids else (*layer_ids, last)
        self._computed = ComputedStates(lambda: Target(model.eval().requires_grad_(False), every))
        self._width = len(layer_ids)
        self._rows = rows  # of a sample in the peer's dataset
        self._folder = folder
        folder.mkdir(parents=True)

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        observed = self._computed.observe(sequences)
        hidden_size = observed.final.shape[-1]
        taps = observed.states[..., : self._width * hidden_size]
        last = observed.states[..., -hidden_size:]
        for place, (index, sequence) in enumerate(sequences):
            if index in self._rows:
                both = torch.cat([taps[place], last[place]], dim=-1)[: len(sequence)]
                save_file(
                    {
                        "hidden_states": both.view(len(sequence), -1, hidden_size),
                        "token_ids": sequence.tokens,
                    },
                    self._folder / f"hs_{self._rows[index]}.safetensors",
                )
        return Observation(taps, observed.final)


def compute_states(target: Path, corpus: Corpus, config: TrainConfig, work: Path) -> None:
    """Fill the file that our run reads, and the dataset that the peer reads."""
    from datasets import Dataset

    everything = [*corpus.split.train, *corpus.split.validation]
    # Its loader requires a validation row, which is not used.
    rows = {index: row for row, index in enumerate(everything[: len(corpus.split.train) + 1])}
    sequences = {i: to_sequence(corpus.samples[i], config.max_length) for i in everything}
    table = [sequences[index] for index in rows]
    dataset = Dataset.from_dict(
        {
            "input_ids": [s.tokens.tolist() for s in table],
            "loss_mask": [[int(p >= s.prompt_length) for p in range(len(s))] for s in table],
            "seq_len": [len(s) for s in table],
        }
    )
    dataset.set_format(type="torch")
    dataset.save_to_disk(work / "peer-data")
    layer_ids = config.target_layer_ids or ()
    source = StatesForBoth(target, layer_ids, rows, work / "peer-data" / "hidden_states")
    kept: StateSource = StatesOnDisk(
        work / "states" / WORK / STATES,
        source,
        corpus.lengths,
        taps=len(layer_ids),
        hidden_size=read_target(target).hidden_size,
        dtype=PRECISION,
    )
    for index in track(everything, description="states"):
        kept.observe([(index, sequences[index])])


# The two trainers


def clocks() -> torch.Tensor:
    """Wall-clock seconds, and CPU seconds, which do not depend on other processes."""
    return torch.tensor([time.monotonic(), time.process_time()], dtype=torch.float64)


def minutes(spent: torch.Tensor) -> Arm:
    wall, processor = (spent / 60).tolist()
    return {"minutes": wall, "processor_minutes": processor}


def train_ours(states: Run, config: TrainConfig, target: Path, folder: Path) -> tuple[Arm, Path]:
    link_states(states.folder.parent, folder)
    run = Run(target, states.corpus, config, folder, states.ranks)
    steps: list[StepRecord] = []
    began = spent = clocks()

    def on_record(record: Record) -> None:
        nonlocal spent
        if isinstance(record, StepRecord):  # the only validation comes after the last step
            steps.append(record)
            spent = clocks()

    numbers = run.train(on_record)
    weights = {name: tensor.to(PRECISION) for name, tensor in load_best(run.folder).items()}
    write_checkpoint(folder / "drafter", weights, run.drafter_config, "zlab")
    seen = [
        run.fetch(index)[1]
        for step in range(numbers.step)
        for index in sequences_of_step(run.corpus.split.train, step, run.config)
    ]
    blocks = (min(run.config.anchors, len(possible_anchors(s.prompt_length, len(s)))) for s in seen)
    arm = {
        "settings": run.config.model_dump(mode="json"),
        "steps": numbers.step,
        "sequences": len(seen),
        "blocks": sum(blocks),
        **minutes(spent - began),
        "first_loss": steps[0].loss,
        "last_loss": steps[-1].loss,
    }
    return arm, folder / "drafter"


def train_peer(
    run: Run, config: TrainConfig, target: Path, work: Path, folder: Path
) -> tuple[Arm, Path]:
    from speculators.train import cli
    from speculators.train.config import TrainConfig as PeerConfig

    samples = len(run.corpus.split.train)
    tokens = sum(run.corpus.lengths[index] for index in run.corpus.split.train) / samples
    settings = [
        *("--speculator-type", "dflash", "--num-layers", config.layers),
        *("--block-size", config.block_size, "--mask-token-id", config.mask_token_id),
        *("--target-layer-ids", *(i + 1 for i in config.target_layer_ids or ())),
        # Rows are packed up to a length; with half a sequence more they hold this many on average.
        *("--total-seq-len", round((config.batch_sequences + 0.5) * tokens)),
        *("--max-anchors", config.batch_sequences * config.anchors, "--max-steps", run.steps),
        *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", 0),
        *(
            "--log-freq",
            10,
            "--on-missing",
            "raise",
            "--train-data-ratio",
            (samples + 0.5) / (samples + 1),
        ),
        *("--lr", config.learning_rate, "--hidden-states-dtype", config.precision),
        *("--seed", config.seed),
    ]
    words = [str(word) for word in settings]
    places = ["--data-path", str(work / "peer-data"), "--save-path", str(folder)]
    trainer = speculators_on_cpu()
    with (
        mock.patch.object(cli, "Trainer", trainer),
        # It is called before each time stamp and raises without an accelerator.
        mock.patch.object(torch.accelerator, "synchronize"),
    ):
        cli.main(PeerConfig.resolve(["--verifier-name-or-path", str(target), *places, *words]))
    seen = trainer.seen
    arm = {
        "settings": " ".join(words),
        "steps": len(seen.losses),
        "sequences": seen.sequences,
        "blocks": seen.blocks,
        **minutes(seen.spent),
        "first_loss": seen.losses[0],
        "last_loss": seen.losses[-1],
    }
    last = max(
        (path for path in folder.iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    return arm, last


class Seen:
    """Counts of the peer's training."""

    def __init__(self) -> None:
        self.spent = torch.zeros(2, dtype=torch.float64)
        self.sequences = 0
        self.blocks = 0
        self.losses: list[float] = []

    def after_forward(self, _model: Any, _inputs: Any, batch: dict[str, Any], output: Any) -> None:
        self.sequences += int(batch["document_ids"].max()) + 1
        self.blocks += int(output[2]["eal_total"])
        self.losses.append(output[1].item())


def speculators_on_cpu() -> Any:
    """The peer's trainer class on a machine without an accelerator, with counters.

    Unchanged it would move everything to device 0 and cast as on CUDA. The number of steps cannot
    be set exactly: after the last step, each further pass over the data adds one.
    """
    from speculators.train.trainer import Trainer

    class SpeculatorsOnCpu(Trainer):
        seen = Seen()

        def __init__(self, model: Any, config: Any, train_loader: Any, _validation: Any) -> None:
            sampler, steps, epochs = train_loader.batch_sampler, 0, 0
            while steps < config.max_steps:
                sampler.set_epoch(epochs)
                steps, epochs = steps + len(sampler), epochs + 1
            super().__init__(model, config._replace(num_epochs=epochs), train_loader, None)
            model.register_forward_hook(self.seen.after_forward, with_kwargs=True)

        def setup_trainer(self) -> None:
            self.local_rank = torch.device("cpu")  # type: ignore[assignment]
            self.device_type = "cpu"
            super().setup_trainer()  # type: ignore[no-untyped-call]

        def train_epoch(self, *arguments: Any, **named: Any) -> None:
            began = clocks()
            super().train_epoch(*arguments, **named)
            self.seen.spent += clocks() - began

    return SpeculatorsOnCpu


def validate(run: Run, drafter: Path) -> Arm:
    """Our validation of a checkpoint on the held-out answers."""
    forward = BlockForward(load_drafter(drafter, PRECISION), run.target_weights.embedding)
    held_out = [run.fetch(index) for index in run.corpus.split.validation]
    drafts = accepted_drafts(forward, run.draft_head, run.source, held_out, BLOCK_SIZE)
    found = summarise(drafts, BLOCK_SIZE)
    walked = [along_decoding(each.counts) for each in drafts]
    accepted, steps = [sum(each) for each in walked], [len(each) for each in walked]
    length = ratio_interval(np.array(accepted, np.float64), np.array(steps, np.float64)).plus(1)
    return {
        "acceptance_length": length.model_dump(),
        "by_source": {name: each.acceptance_length for name, each in found.by_source.items()},
        "every_position": found.overall.every_position,
        "by_position": found.overall.by_position,
        "accepted_by_text": accepted,
        "steps_by_text": steps,
    }


if __name__ == "__main__":
    main()

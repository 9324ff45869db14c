"""A training run put together: target files, data, states, drafter, loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadout.data.manifest import DataFolder
from leadout.dflash.config import DrafterConfig
from leadout.dflash.target import Target
from leadout.errors import LeadoutError
from leadout.evaluate.acceptance import (
    AcceptedDrafts,
    Validation,
    accepted_drafts,
    accepted_drafts_over_ranks,
    summarise,
)
from leadout.evaluate.blocks import BlockForward, Split, split, to_sequence
from leadout.evaluate.hidden_states import (
    ComputedStates,
    Indexed,
    KeptStates,
    StateSource,
    load_model,
)
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.target_weights import Borrowed, TargetFiles, borrow
from leadout.models import fingerprint
from leadout.shards import Sample, Samples
from leadout.train.config import TrainConfig
from leadout.train.init import (
    choose_mask_token,
    first_drafter,
    new_config,
    spread_layer_ids,
)
from leadout.train.loop import (
    Gradient,
    Loop,
    RunNumbers,
    TrainedWeights,
    remove_leftovers,
    total_steps,
)
from leadout.train.progress import Listener

WORK = "run"  # the part of the output folder that a run needs to continue
STATES = "states.bin"
# States on disk pay from the second pass on, as one pass of the target costs more than several of
# the drafter; beyond so many bytes they are computed anew.
MOST_STATE_BYTES = 200e9


class UnfitDataError(LeadoutError):
    """The data is not the target's own, or too little of it can be used."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The data as a run sees it."""

    samples: Samples
    split: Split
    lengths: list[int]  # of every sample, cut to the longest allowed
    token_counts: Tensor  # [vocab] how often each token occurs in training answers
    content_hash: str


def read_corpus(data: DataFolder, target: Path, config: TrainConfig, vocab_size: int) -> Corpus:
    """Read all samples once; the target must be the one that answered."""
    found, wanted = fingerprint(target), data.job.target_fingerprint
    if found != wanted:
        raise UnfitDataError(
            f"--data {data.folder}: found answers of {data.job.target} (fingerprint "
            f"{wanted[:12]}), wanted those of {target} ({found[:12]}): a drafter learns only from "
            "its own target's text; run `leadout data` with this target"
        )
    samples = data.samples()
    parts = split(samples, config.max_length, config.validation_sequences)
    if not parts.train or not parts.validation:
        raise UnfitDataError(
            f"--data {data.folder}: found {len(parts.train)} samples to train on and "
            f"{len(parts.validation)} greedy ones to hold out, wanted at least 1 of each; make "
            "more data, some of it greedy"
        )
    training = set(parts.train)
    if not any(_can_be_judged(samples[index], config) for index in parts.validation):
        raise UnfitDataError(
            f"--block-size: found {config.block_size}, wanted less: none of the "
            f"{len(parts.validation)} greedy answers held out has so many tokens (of at most "
            f"--max-length {config.max_length} with their prompts)"
        )
    lengths, counts = [], torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(samples)):
        sample = samples[index]
        lengths.append(min(len(sample.prompt) + len(sample.response), config.max_length))
        if index in training:
            counts += torch.bincount(torch.tensor(sample.response), minlength=vocab_size)
    return Corpus(samples, parts, lengths, counts, data.content_hash())


def _can_be_judged(sample: Sample, config: TrainConfig) -> bool:
    """Whether a whole block lies in the answer."""
    room = config.max_length - len(sample.prompt)
    return min(len(sample.response), room) >= config.block_size


def resolve(config: TrainConfig, target: Path, corpus: Corpus, vocab_size: int) -> TrainConfig:
    """Fill in what is chosen from target and data."""
    from transformers import AutoConfig, AutoTokenizer

    text = AutoConfig.from_pretrained(target).get_text_config()
    changes: dict[str, Any] = {}
    if config.target_layer_ids is None:
        changes["target_layer_ids"] = spread_layer_ids(text.num_hidden_layers)
    if config.mask_token_id is None:
        tokenizer = AutoTokenizer.from_pretrained(target)
        ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        ends |= _stop_tokens(target)
        first = corpus.samples[corpus.split.train[0]]
        used = set(torch.nonzero(corpus.token_counts).flatten().tolist()) | set(first.prompt)
        changes["mask_token_id"] = choose_mask_token(
            vocab_size,
            max(tokenizer.get_vocab().values()) + 1,
            tokenizer.added_tokens_decoder.keys(),
            {end for end in ends if end is not None},
            used,
        )
    if config.states == "auto":
        taps = len(changes.get("target_layer_ids") or config.target_layer_ids or ())
        size = sum(corpus.lengths) * (taps + 1) * text.hidden_size * 2
        pays = config.epochs > 1 and size <= MOST_STATE_BYTES
        changes["states"] = "disk" if pays else "compute"
    return config.model_copy(update=changes)


def _stop_tokens(target: Path) -> set[int]:
    """The tokens that end a text by the target's generation config, where it has one."""
    path = target / "generation_config.json"
    found: Any = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    every = found if isinstance(found, list) else [found]
    return {token for token in every if token is not None}


class Run:
    """A run whose parts are in place; `train` carries it out or goes on with it."""

    def __init__(
        self,
        target: Path,
        corpus: Corpus,
        config: TrainConfig,
        out: Path,
        ranks: Ranks,
        shape: DrafterConfig | None = None,
    ) -> None:
        """`shape` is that of the drafter to go on from, where it is not one of our making."""
        from transformers import AutoConfig

        self.config = config
        self.corpus = corpus
        self.ranks = ranks
        self.folder = out / WORK
        self._target = target
        self._precision = getattr(torch, config.precision)
        files = TargetFiles(target)
        self.drafter_config = shape or new_config(
            target,
            AutoConfig.from_pretrained(target),
            layers=config.layers,
            block_size=config.block_size,
            target_layer_ids=config.target_layer_ids or (),
            mask_token_id=config.mask_token_id or 0,
        )
        self.drafter = first_drafter(self.drafter_config, config.initial, config.seed)
        self.drafter.to(ranks.device)
        self.weights = TrainedWeights(self.drafter, self._precision)
        self.borrowed: Borrowed = borrow(files, self._precision, ranks.device)
        self._forward = BlockForward(self.drafter, self.borrowed.embedding)
        compiled = torch.compile(self._forward, dynamic=False) if config.compile else self._forward
        self.source = self._state_source(self.folder)
        self.gradient = Gradient(
            compiled, self.weights, self.borrowed, self.source, config, self._frequent()
        )
        self.steps = total_steps(len(corpus.split.train), config)

    def train(self, listen: Listener) -> RunNumbers:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.ranks.leads:
            remove_leftovers(self.folder)
        loop = Loop(
            self.folder,
            self.weights,
            self.gradient,
            self.config,
            self.ranks,
            self.corpus.split.train,
            self.fetch,
            self.validate,
            listen,
        )
        return loop.run()

    def fetch(self, index: int) -> Indexed:
        return index, to_sequence(self.corpus.samples[index], self.config.max_length)

    def validate(self) -> Validation:
        return self.judge(self.corpus.split.validation)

    def judge(self, indices: Sequence[int]) -> Validation:
        """Acceptance over some of the samples."""
        held_out = [self.fetch(index) for index in indices]
        size = self.config.block_size

        def judge(part: Sequence[Indexed]) -> list[AcceptedDrafts]:
            return accepted_drafts(self._forward, self.borrowed, self.source, part, size)

        return summarise(accepted_drafts_over_ranks(self.ranks, held_out, judge, size), size)

    def _state_source(self, folder: Path) -> StateSource:
        computed = ComputedStates(self._load_target)
        if self.config.states == "compute":
            return computed
        return KeptStates(
            folder / STATES,
            computed,
            self.corpus.lengths,
            taps=len(self.drafter_config.target_layer_ids),
            hidden_size=self.drafter_config.context_size,
            dtype=self._precision,
        )

    def _load_target(self) -> Target:
        model = load_model(self._target, self._precision).to(self.ranks.device)
        return Target(model, self.drafter_config.target_layer_ids)

    def _frequent(self) -> Tensor | None:
        """The most frequent tokens of the answers, or None: score against all."""
        wanted = self.config.candidates
        if wanted is None or wanted >= len(self.corpus.token_counts):
            return None
        return self.corpus.token_counts.topk(wanted).indices.to(self.ranks.device)

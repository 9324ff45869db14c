"""A training run and its parts: data, target hidden states, drafter and loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from leadout.checkpoints import read_checkpoint
from leadout.data.chat import load_tokenizer
from leadout.data.manifest import DataFolder
from leadout.dflash.config import DrafterConfig
from leadout.dflash.target import Target
from leadout.evaluate.acceptance import (
    AcceptedDrafts,
    DraftHead,
    Validation,
    accepted_drafts,
    accepted_drafts_over_ranks,
    summarise,
)
from leadout.evaluate.blocks import BlockForward, Split, split, to_sequence
from leadout.evaluate.hidden_states import (
    ComputedStates,
    Indexed,
    StatesOnDisk,
    StateSource,
    announce,
    compute_dtype,
    load_model,
)
from leadout.evaluate.ranks import Ranks, empty_device_cache
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.files import MissingFileError, read_object
from leadout.leftovers import remove_abandoned
from leadout.models import fingerprint
from leadout.pairing import read_sizes
from leadout.pairing.target import spread_layer_ids
from leadout.shards import SampleSet
from leadout.train.config import TrainConfig, TrainError
from leadout.train.gradient import Gradient, blocks_per_sequence, uses_flex
from leadout.train.init import (
    CopiedHead,
    TokenCounts,
    choose_mask_token,
    default_layers,
    frequent_tokens,
    load_copied_head,
    new_config,
    new_drafter,
    trained_drafter,
    without_copied_head,
)
from leadout.train.loop import Loop, total_steps
from leadout.train.progress import Listener
from leadout.train.sharding import gathered, shard
from leadout.train.state import MasterWeights, RunStatus, remove_stale_parts

_Item = TypeVar("_Item")
WORK = "run"  # the part of the output folder that a run needs to continue
STATES = "states.bin"
# From the second epoch on, reading states is cheaper than computing them: a pass of the target
# costs more than several of the drafter. Larger files than this are not written automatically.
MAX_STATE_BYTES = 200e9
# How many shapes of matrix products oneDNN keeps compiled on CPUs, with memory for each. Passes
# differ in their shapes, so that its default, 1024, takes gigabytes in a long run.
PRIMITIVE_CACHE, MAX_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"


@dataclass(frozen=True, slots=True)
class Corpus:
    """The data of a run."""

    samples: SampleSet
    split: Split
    lengths: list[int]  # of every sample, cut to the maximum length
    answers: list[int]  # the part of each length that is the answer
    token_counts: Tensor  # [vocab] how often each token occurs in training answers
    content_hash: str


def read_corpus(data: DataFolder, target: Path, config: TrainConfig, vocab_size: int) -> Corpus:
    """Read and parse all samples once; they must be answers of this target."""
    expected, answered_by = fingerprint(target), data.job.target_fingerprint
    if answered_by != expected:
        raise TrainError(
            f"--data {data.folder} holds answers of {data.job.target} (fingerprint "
            f"{answered_by[:12]}), not of {target} ({expected[:12]}). A drafter learns from its "
            "own target's answers: run `leadout data` with this target."
        )
    counted = TokenCounts(vocab_size)
    samples = data.samples(lambda sample: counted.add(sample.response))
    parts = split(samples.facts, config.max_length, config.validation_sequences)
    if not parts.train or not parts.validation:
        raise TrainError(
            f"--data {data.folder} has {len(parts.train)} samples to train on and "
            f"{len(parts.validation)} to hold out; at least 1 of each is required. Generate more "
            "data."
        )
    held_out = [samples.facts[index] for index in parts.validation]
    if not any(
        min(each.response_length, config.max_length - each.prompt_length) >= config.block_size
        for each in held_out
    ):  # acceptance can only be measured on whole blocks
        raise TrainError(
            f"--block-size {config.block_size} is too large: none of the {len(held_out)} held-out "
            f"answers has that many tokens within --max-length {config.max_length}."
        )
    training = set(parts.train)
    for index in range(len(samples)):
        if index not in training:  # few
            counted.remove(samples[index].response)
    return _corpus(samples, parts, config.max_length, counted, data.content_hash())


def make_corpus(
    samples: SampleSet, parts: Split, max_length: int, vocab_size: int, content_hash: str
) -> Corpus:
    counted = TokenCounts(vocab_size)
    for index in sorted(set(parts.train)):
        counted.add(samples[index].response)
    return _corpus(samples, parts, max_length, counted, content_hash)


def _corpus(
    samples: SampleSet, parts: Split, max_length: int, counted: TokenCounts, content_hash: str
) -> Corpus:
    facts = samples.facts
    lengths = [min(each.prompt_length + each.response_length, max_length) for each in facts]
    answers = [max(0, n - each.prompt_length) for n, each in zip(lengths, facts, strict=True)]
    return Corpus(samples, parts, lengths, answers, counted.total(), content_hash)


def evenly_spaced(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` of the items, from their whole range."""
    taken = min(count, len(items))
    return [items[len(items) * place // taken] for place in range(taken)]


def complete_settings(
    config: TrainConfig, target: Path, corpus: Corpus, vocab_size: int
) -> TrainConfig:
    """Fill in the settings that are chosen from target and data."""
    sizes = read_sizes(target)
    changes: dict[str, Any] = {}
    if config.layers is None:
        changes["layers"] = default_layers(sizes)
    if config.target_layer_ids is None:
        changes["target_layer_ids"] = spread_layer_ids(sizes.num_layers)
    if config.mask_token_id is None:
        tokenizer = load_tokenizer(target)
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
        taps = changes.get("target_layer_ids") or config.target_layer_ids or ()
        size = state_bytes(corpus, len(taps), sizes.hidden_size)
        on_disk = config.passes > 1 and size <= MAX_STATE_BYTES
        changes["states"] = "disk" if on_disk else "compute"
    return config.model_copy(update=changes)


def state_bytes(corpus: Corpus, taps: int, hidden_size: int) -> int:
    """What the states of all samples take on disk, in 16 bits."""
    return sum(corpus.lengths) * (taps + 1) * hidden_size * 2


def _stop_tokens(target: Path) -> set[int]:
    """The tokens that end a text by the target's generation config, if it has one."""
    try:
        found = read_object(target / "generation_config.json").get("eos_token_id")
    except MissingFileError:
        return set()
    every = found if isinstance(found, list) else [found]
    return {token for token in every if isinstance(token, int)}


class Run:
    """A training run with all its parts in memory; `train` starts or continues it."""

    def __init__(
        self,
        target: Path,
        corpus: Corpus,
        config: TrainConfig,
        out: Path,
        ranks: Ranks,
        shape: DrafterConfig | None = None,
        states: StateSource | None = None,
    ) -> None:
        """`config` must be complete. `shape` replaces the default shape of a new drafter.

        The head of a drafter with a reduced draft vocabulary is a copy of rows of the target's:
        training uses the target's head, and `write_best` adds the copy.
        `states` are the target's hidden states from servers; by default they are computed here.
        """
        assert config.layers is not None
        assert config.target_layer_ids is not None
        assert config.mask_token_id is not None
        os.environ.setdefault(PRIMITIVE_CACHE, MAX_PRIMITIVES)  # read at the first product
        if config.compile and config.packing:
            raise TrainError(
                "--compile cannot be combined with --packing: packed passes differ in shape, and "
                "each shape would be compiled anew. Omit one of them."
            )
        if config.sharded and config.walk_share:
            raise TrainError(
                "--sharded cannot be combined with --walk-share: all processes must run equally "
                "many passes, and how many those blocks need is known afterwards. Omit one of them."
            )
        self.config = config
        self.corpus = corpus
        self.ranks = ranks
        self.steps = total_steps(len(corpus.split.train), config)
        self.folder = out / WORK
        precision: torch.dtype = getattr(torch, config.precision)  # of files
        self.computed_in = compute_dtype(precision, ranks.device)
        self.drafter_config = shape or new_config(
            target,
            layers=config.layers,
            block_size=config.block_size,
            target_layer_ids=config.target_layer_ids,
            mask_token_id=config.mask_token_id,
            window=config.window,
            mlp_width=config.mlp_width,
            draft_vocab=config.draft_vocab,
        )
        if config.initial == "random":
            self.drafter = new_drafter(without_copied_head(self.drafter_config), config.seed)
        else:
            self.drafter = trained_drafter(self.drafter_config, Path(config.initial))
        self.target_weights = load_target_weights(
            TargetFiles(target), self.computed_in, ranks.device
        )
        self.draft_head = DraftHead(self.target_weights.head)
        self.copied_head: CopiedHead | None = None
        if self.drafter_config.own_head:  # as it will be served
            self.copied_head = self._copied_head()
            ids = self.copied_head.target_ids.to(ranks.device)
            self.draft_head = DraftHead(self.target_weights.head[ids], ids)
        self.drafter.recompute = config.recompute
        flex = uses_flex(config, ranks.device)
        forward = BlockForward(self.drafter, self.target_weights.embedding, flex=flex)
        sharded = config.sharded and ranks.count > 1
        if sharded:
            if config.compile:
                raise TrainError("--compile cannot be combined with --sharded. Omit one of them.")
            shard(forward, self.computed_in, ranks)
            self._forward = forward  # sharded weights are gathered by this module only
        else:
            self.drafter.to(ranks.device)
            self._forward = BlockForward(self.drafter, self.target_weights.embedding)
        self.weights = MasterWeights(self.drafter, self.computed_in, sharded=sharded)
        compiled = torch.compile(forward, dynamic=False) if config.compile else forward
        taps = self.drafter_config.target_layer_ids
        self.target_in_process = states is None
        computed = states or ComputedStates(
            lambda: Target(load_model(target, self.computed_in).to(ranks.device), taps)
        )
        self.source: StateSource = computed
        if config.states == "disk":
            self.source = StatesOnDisk(
                self.folder / STATES,
                computed,
                corpus.lengths,
                taps=len(taps),
                hidden_size=self.drafter_config.context_size,
                dtype=precision,
            )
        count, counts = config.candidates, corpus.token_counts
        frequent = None  # None: score the whole vocabulary
        if count is not None and count < len(counts):
            frequent = counts.topk(count).indices.to(ranks.device)
        self.gradient = Gradient(
            compiled,
            self.weights,
            self.target_weights,
            self.source,
            config,
            frequent,
            self.drafter_config.logit_scaling,
            steps=self.steps,
            count_passes=ranks.max if sharded else int,
            spare=lambda: self.fetch(corpus.split.train[0]),
        )
        answers = [corpus.answers[index] for index in corpus.split.train]
        self.blocks_per_step = config.batch_sequences * blocks_per_sequence(answers, config)

    def _copied_head(self) -> CopiedHead:
        """The head of the drafter that training continues, or one for frequent tokens."""
        initial = self.config.initial
        if initial != "random" and read_checkpoint(Path(initial)).config.own_head:
            return load_copied_head(Path(initial))
        size = self.drafter_config.draft_vocab_size
        assert size is not None  # a head of its own that is not reduced is refused before
        ids = frequent_tokens(self.corpus.token_counts, size)
        return CopiedHead.of(self.target_weights.head, ids)

    def train(self, listen: Listener) -> RunStatus:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.ranks.is_leader:
            remove_abandoned(self.folder)
            remove_stale_parts(self.folder)
        self.ranks.barrier()  # no rank writes before that
        return Loop(self, listen).train()

    def require_room(self) -> None:
        """Refuse states on a disk that cannot hold them; not for runs that only time steps."""
        if isinstance(self.source, StatesOnDisk):
            self.source.require_room()

    def release(self) -> None:
        """Free the device; afterwards only the settings, the data and the files can be used.

        An engine that starts next claims most of the device at once.
        """
        if isinstance(self.source, StatesOnDisk):
            self.source.close()
        del self.drafter, self.weights, self.target_weights, self.source, self.gradient
        del self._forward, self.draft_head
        if self.config.compile:
            torch.compiler.reset()  # its caches refer to the compiled modules
        empty_device_cache()

    def fetch(self, index: int) -> Indexed:
        return index, to_sequence(self.corpus.samples[index], self.config.max_length)

    def validate(self) -> Validation:
        """Acceptance on the held-out samples."""
        return self.evaluate(self.corpus.split.validation)

    def evaluate(self, indices: Sequence[int]) -> Validation:
        """Acceptance on some of the samples."""
        sequences = [self.fetch(index) for index in indices]
        size = self.config.block_size

        def accepted(part: Sequence[Indexed]) -> list[AcceptedDrafts]:
            announce(self.source, part)
            with gathered(self._forward):
                return accepted_drafts(self._forward, self.draft_head, self.source, part, size)

        return summarise(accepted_drafts_over_ranks(self.ranks, sequences, accepted, size), size)

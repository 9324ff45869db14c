"""New drafters: shape, mask token and initial weights, or a trained one with fewer draft tokens.

A reduced draft vocabulary has the target's most frequent tokens. With a large vocabulary and a
small drafter, the output head is the largest cost of drafting. Rare tokens are then never drafted;
the target still generates them, as its output never depends on drafts.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leadout.checkpoints import Checkpoint, load_weights, read_checkpoint, write_checkpoint
from leadout.checkpoints.store import read_tensors
from leadout.checkpoints.tensors import DRAFT_TO_TARGET
from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.drafter import Drafter
from leadout.evaluate.target_weights import HEAD, TargetFiles, load_target_weights
from leadout.pairing import TargetSizes, read_sizes, read_target, require_trainable, shape_for
from leadout.pairing.target import decoder_section, read_any_config
from leadout.pairing.trainable import drafter_rope
from leadout.train.config import TrainError

# At a norm of 1, a new drafter's random outputs would give an initial loss several times that of
# a uniform guess.
INITIAL_NORM = 0.25
SMALL_TARGET_PARAMETERS = 1e9
# Where the target's config omits them.
DEFAULT_POSITIONS = 4096
DEFAULT_EPSILON = 1e-6


def default_layers(target: TargetSizes) -> int:
    """Draft layers for a target: fewer for a small one, whose own step takes little time."""
    return 2 if target.parameters < SMALL_TARGET_PARAMETERS else 5


def choose_mask_token(
    vocab_size: int,
    tokenizer_size: int,
    special_tokens: Iterable[int],
    end_tokens: Iterable[int],
    used: set[int],
) -> int:
    """A row of the target's embedding that has no meaning in the data.

    Preferably one beyond the tokenizer; else a special token that neither ends a text nor occurs.
    """
    if tokenizer_size < vocab_size:
        return tokenizer_size
    free = sorted(set(special_tokens) - set(end_tokens) - used)
    if free:
        return free[0]
    raise TrainError(
        f"No mask token could be chosen automatically: all {vocab_size} rows of the embedding "
        "belong to the tokenizer, and every special token is in use. Set --mask-token-id to a "
        "token id that your traffic never contains."
    )


def new_config(
    target: Path,
    *,
    layers: int,
    block_size: int,
    target_layer_ids: Sequence[int],
    mask_token_id: int,
    window: int | None = None,
    mlp_width: int | None = None,
    draft_vocab: int | None = None,
) -> DrafterConfig:
    """A drafter of a shape that suits the target, all layers bidirectional over the whole context.

    Layers with a window are causal: the form of published drafters, which vLLM reads. The
    MLPs are as wide as the target's unless `mlp_width` is given. With `draft_vocab` the drafter has
    an output head of its own for so many tokens. Only config.json is read, so this works for
    targets that transformers cannot load.
    """
    require_trainable(target)
    config, facts, shape = (
        read_any_config(target),
        read_target(target),
        shape_for(read_sizes(target), mlp_width),
    )
    rope = drafter_rope(config, str(target))
    assert rope is not None  # else the target would not be trainable
    epsilon = decoder_section(config)[0].get("rms_norm_eps")
    return DrafterConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=shape.mlp_width,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        layers=(LayerAttention(window, causal=window is not None),) * layers,
        rope=rope,
        max_positions=facts.max_positions or DEFAULT_POSITIONS,
        rms_norm_eps=epsilon if isinstance(epsilon, float) else DEFAULT_EPSILON,
        target_layer_ids=tuple(target_layer_ids),
        target_num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        mask_token_id=mask_token_id,
        block_size=block_size,
        own_head=draft_vocab is not None,
        draft_vocab_size=draft_vocab,
    )


def without_copied_head(config: DrafterConfig) -> DrafterConfig:
    """The part of a drafter that is trained: a reduced head is a copy of the target's rows."""
    return dataclasses.replace(config, own_head=False, draft_vocab_size=None)


def new_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """Random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        nn.init.normal_(drafter.fc.weight, std=drafter.fc.in_features**-0.5)
        nn.init.constant_(drafter.norm.weight, INITIAL_NORM)
    return drafter


def trained_drafter(config: DrafterConfig, folder: Path) -> Drafter:
    """The weights of a trained drafter; only its block size may differ, and it may have no head.

    A head that is a copy of the target's is left out: training uses the target's.
    """
    checkpoint, trainable = read_checkpoint(folder), without_copied_head(config)
    asked = config if checkpoint.config.own_head else trainable
    for field in dataclasses.fields(config):
        trained = getattr(checkpoint.config, field.name)
        expected = getattr(asked, field.name)
        if field.name != "block_size" and trained != expected:
            raise TrainError(
                f"--initial {folder}: this drafter has {field.name} {trained}, but the settings "
                f"ask for {expected}. Use the settings of that drafter (only the block size may "
                "differ), or start with --initial random."
            )
    drafter, weights = new_drafter(trainable, seed=0), load_weights(checkpoint)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
    return drafter


def reduce_draft_vocab(
    source: Path, destination: Path, target: Path, answers: Iterable[Sequence[int]], size: int
) -> tuple[Checkpoint, float]:
    """Write `source` with a head of `size` rows.

    Returns the new checkpoint and the share of the answers' tokens that it can draft. `answers`
    are token ids generated by the target.
    """
    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    if config.own_head:
        raise TrainError(
            f"{source} already has its own output head ({config.head_rows} rows). Use the drafter "
            "that it was made from, which uses the target's head."
        )
    counted = TokenCounts(config.vocab_size)
    for answer in answers:
        counted.add(answer)
    counts = counted.total()
    rows = frequent_tokens(counts, size)
    weights = load_weights(checkpoint)
    dtype = weights["fc.weight"].dtype
    head = load_target_weights(TargetFiles(target), dtype, torch.device("cpu")).head
    weights |= CopiedHead.of(head, rows).tensors()
    write_checkpoint(
        destination,
        weights,
        dataclasses.replace(config, own_head=True, draft_vocab_size=size),
        "speculators",  # the only published format with a draft vocabulary
        target_name=str(target),
        draft_tokens=checkpoint.draft_tokens,
    )
    return read_checkpoint(destination), float(counts[rows].sum() / counts.sum())


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The ids [size], ascending, of the most frequent tokens; `counts` is [vocab].

    If fewer tokens have been seen, others are added, which are never drafted.
    """
    if not 0 < size < len(counts):
        raise TrainError(
            f"--draft-vocab {size} must be between 1 and {len(counts) - 1}: the target has "
            f"{len(counts)} tokens."
        )
    return counts.topk(size).indices.sort().values


class CopiedHead(NamedTuple):
    """The head of a drafter with a reduced draft vocabulary."""

    rows: Tensor  # [draft vocab, H]
    mapping: Tensor  # [draft vocab] draft id i is target id i + mapping[i]

    @classmethod
    def of(cls, head: Tensor, ids: Tensor) -> CopiedHead:
        """The rows of the target's head [vocab, H] for ascending token ids, on the CPU."""
        return cls(head[ids.to(head.device)].cpu(), ids.cpu() - torch.arange(len(ids)))

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """By their names in a checkpoint."""
        return {HEAD: self.rows.to(dtype or self.rows.dtype), DRAFT_TO_TARGET: self.mapping}

    @property
    def target_ids(self) -> Tensor:
        return self.mapping + torch.arange(len(self.mapping))


def load_copied_head(folder: Path) -> CopiedHead:
    stored = read_checkpoint(folder).tensors.drafter
    found = dict(read_tensors({name: stored[name] for name in (HEAD, DRAFT_TO_TARGET)}))
    return CopiedHead(found[HEAD], found[DRAFT_TO_TARGET])


def changed_head_rows(folder: Path, target: Path) -> int:
    """How many rows of a reduced drafter's head are not those of the target's head."""
    copied, cpu = load_copied_head(folder), torch.device("cpu")
    head = load_target_weights(TargetFiles(target), copied.rows.dtype, cpu).head
    ids = copied.target_ids
    if head.shape[1] != copied.rows.shape[1] or int(ids.max()) >= len(head):
        return len(ids)
    return int((head[ids] != copied.rows).any(dim=1).sum())


class TokenCounts:
    """How often each token occurs in answers; counted in large pieces, for large vocabularies."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._waiting = array("q")

    def add(self, tokens: Sequence[int]) -> None:
        largest = max(tokens, default=0)
        if largest >= len(self._counts):
            raise TrainError(
                f"The data has the token id {largest}, but the target has {len(self._counts)} "
                "tokens. Use data that was made with this target."
            )
        self._waiting.extend(tokens)
        if len(self._waiting) >= len(self._counts):
            self.total()

    def remove(self, tokens: Sequence[int]) -> None:
        removed = torch.tensor(tokens, dtype=torch.int64)
        self._counts -= torch.bincount(removed, minlength=len(self._counts))

    def total(self) -> Tensor:
        """[vocab]"""
        if self._waiting:
            tokens = torch.tensor(self._waiting)
            self._counts += torch.bincount(tokens, minlength=len(self._counts))
            self._waiting = array("q")
        return self._counts

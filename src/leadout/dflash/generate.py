"""The reference decoding loop: draft a block, verify it in one target step, commit, repeat.

This is the reference that the engine is compared with, written to be correct and readable. At every
step it does what vLLM's DFlash does:

    prefill     the target reads the prompt and chooses the first token, the anchor
    propose     K drafts for the tokens after the anchor
    step        the target reads the anchor and the drafts in one pass
    verify      accept leading drafts, and take one more token from the target itself
    commit      states of the anchor and the accepted drafts; the extra token is the next anchor

Statistics follow vLLM's counters: they count complete verification steps, before a stop token or
the length limit truncates the text; the token from the prefill belongs to no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from leadout.dflash.drafter import Drafter
from leadout.dflash.propose import BlockProposer, Proposal, Proposer
from leadout.dflash.target import Target
from leadout.dflash.target_cache import TargetCache
from leadout.dflash.verify import (
    Sampling,
    Verdict,
    choose,
    distribution,
    verify_greedy,
    verify_sampled,
)

GREEDY = Sampling()
MAX_BATCH = 32


@dataclass(slots=True)
class Completion:
    """The result for one prompt."""

    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    accepted: list[int] = field(default_factory=list)  # accepted drafts in each step

    @property
    def acceptance_length(self) -> float:
        return acceptance_length([self])


def acceptance_length(completions: Iterable[Completion]) -> float:
    """Tokens per target step over all steps of these completions; 1 when there were none."""
    accepted = [count for completion in completions for count in completion.accepted]
    return 1.0 + sum(accepted) / max(len(accepted), 1)


def acceptance_by_position(completions: Iterable[Completion], draft_tokens: int) -> list[float]:
    """For each draft position, the share of steps in which its draft was accepted."""
    accepted = [count for completion in completions for count in completion.accepted]
    steps = max(len(accepted), 1)
    return [sum(count > place for count in accepted) / steps for place in range(draft_tokens)]


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    draft_tokens: int | None = None,
    sampling: Sampling = GREEDY,
    sample_drafts: bool = False,
    stop_tokens: Sequence[int] = (),
    batch_size: int = 8,
    seed: int = 0,
) -> list[Completion]:
    """Continue prompts of token ids; without a drafter, by plain decoding.

    `draft_tokens` is K, by default the drafter's block size minus one. With `sample_drafts` drafts
    are sampled instead of greedy; the distribution of the text is the same.
    """
    if not 1 <= batch_size <= MAX_BATCH:
        raise ValueError(f"batch_size is {batch_size}; expected 1 to {MAX_BATCH}")
    if sample_drafts and sampling.is_greedy:
        raise ValueError("sample_drafts requires a temperature above 0")
    count = 0
    if drafter is not None:
        count = drafter.config.max_draft_tokens if draft_tokens is None else draft_tokens
        _require_draft_tokens(drafter, count)
        _require_positions(drafter, prompts, max_new_tokens + count)
    generator = torch.Generator(target.embedding.device).manual_seed(seed)

    completions: list[Completion] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        proposer: Proposer = NothingProposer()
        if drafter is not None:
            drawing = sampling if sample_drafts else None
            proposer = BlockProposer(drafter, target, len(batch), drawing, generator)
        completions += decode(
            target,
            proposer,
            batch,
            max_new_tokens=max_new_tokens,
            draft_tokens=count,
            sampling=sampling,
            stop_tokens=stop_tokens,
            generator=generator,
        )
    return completions


def decode(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    draft_tokens: int,
    sampling: Sampling,
    stop_tokens: Sequence[int],
    generator: torch.Generator,
) -> list[Completion]:
    """One batch through the loop, with drafts from any proposer."""
    device = target.embedding.device
    completions = [Completion() for _ in prompts]

    padded, lengths = _left_padded(prompts, device)
    mask = (
        torch.arange(padded.shape[1], device=device) >= padded.shape[1] - lengths[:, None]
    ).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = TargetCache(lengths)
    prefill = target.step(padded, positions, cache, mask, keep_logits=1)
    proposer.commit(_rows_to_the_left(prefill.states, lengths), lengths)
    anchors = choose(prefill.logits[:, -1], sampling, generator)  # [batch]
    running = list(range(len(prompts)))  # the completion that each row belongs to
    for row, anchor in zip(running, anchors.tolist(), strict=True):
        _extend(completions[row], [anchor], stop_tokens, max_new_tokens)

    while True:
        unfinished = [i for i, row in enumerate(running) if completions[row].finish is None]
        if not unfinished:
            return completions
        if len(unfinished) < len(running):
            index = torch.tensor(unfinished, device=device)
            cache.keep_rows(index)
            proposer.keep_rows(index)
            anchors = anchors[index]
            running = [running[i] for i in unfinished]

        proposal = proposer.propose(anchors, draft_tokens)
        tokens = torch.cat([anchors[:, None], proposal.tokens], dim=1)  # [batch, K+1]
        new = tokens.shape[1]
        positions = cache.lengths[:, None] + torch.arange(new, device=device)
        step = target.step(tokens, positions, cache, cache.attention_mask(new))
        verdict = _verify(proposal, step.logits, sampling, generator)
        counts = verdict.accepted + 1  # the anchor and the accepted drafts
        cache.commit(new, counts)
        proposer.commit(step.states, counts)

        rows = zip(
            running, proposal.tokens.tolist(), *(part.tolist() for part in verdict), strict=True
        )
        for row, drafts, accepted, next_token in rows:
            if draft_tokens:
                completions[row].accepted.append(accepted)
            committed = [*drafts[:accepted], next_token]
            _extend(completions[row], committed, stop_tokens, max_new_tokens)
        anchors = verdict.next_token


class NothingProposer:
    """Plain decoding: proposes no drafts."""

    def commit(self, states: Tensor, counts: Tensor) -> None:
        pass

    def propose(self, anchors: Tensor, count: int) -> Proposal:
        return Proposal(anchors.new_empty((anchors.shape[0], 0)), None)

    def keep_rows(self, index: Tensor) -> None:
        pass


def _verify(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> Verdict:
    if sampling.is_greedy:
        return verify_greedy(proposal.tokens, target_logits)
    target_probabilities = distribution(target_logits, sampling)
    return verify_sampled(proposal.tokens, target_probabilities, proposal.probabilities, generator)


def _extend(
    completion: Completion, committed: Sequence[int], stop_tokens: Sequence[int], limit: int
) -> None:
    """Add committed tokens up to and including a stop token, and never past the limit."""
    for token in committed:
        completion.tokens.append(token)
        if token in stop_tokens:
            completion.finish = "stop"
            return
        if len(completion.tokens) == limit:
            completion.finish = "length"
            return


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor [batch, longest], each ending at its right edge, and their lengths."""
    if not all(prompts):
        raise ValueError("a prompt is empty; expected at least one token")
    longest = max(len(prompt) for prompt in prompts)
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)


def _rows_to_the_left(states: Tensor, lengths: Tensor) -> Tensor:
    """Rows [batch, longest, width] that end at the right edge, moved to start at the left."""
    longest = states.shape[1]
    places = torch.arange(longest, device=states.device) + (longest - lengths)[:, None]
    wide = places.clamp(max=longest - 1)[:, :, None].expand(-1, -1, states.shape[2])
    return states.gather(1, wide)


def _require_draft_tokens(drafter: Drafter, count: int) -> None:
    limit = drafter.config.max_draft_tokens
    if not 1 <= count <= limit:
        raise ValueError(
            f"draft_tokens is {count}; expected 1 to {limit}, since the drafter's block of "
            f"{limit + 1} tokens includes the anchor"
        )


def _require_positions(drafter: Drafter, prompts: Sequence[Sequence[int]], new: int) -> None:
    needed = max((len(prompt) for prompt in prompts), default=0) + new
    if needed > drafter.config.max_positions:
        raise ValueError(
            f"the longest prompt and its answer need {needed} positions, the drafter has "
            f"{drafter.config.max_positions}; shorten the prompts or lower max_new_tokens"
        )

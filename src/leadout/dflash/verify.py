"""Which drafts to accept, so that the text is exactly what the target alone would generate.

Greedy: a draft is accepted if it is the target's own choice. Sampled: with p the distribution of
the target at a position and q the one that the draft x was drawn from,

    accept x with probability min(1, p(x) / q(x)); else draw from max(p - q, 0), normalized.

Whatever q is, the resulting token is distributed as p. A greedy drafter has q(x) = 1: accept x with
probability p(x), else draw from p without x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen from logits; temperature 0 is greedy, top_k 0 is no limit."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; expected a number in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected 0 (no limit) or more")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Verdict(NamedTuple):
    """The result of a verification step for each row."""

    accepted: Tensor  # [batch] number of accepted drafts
    next_token: Tensor  # [batch] the token after them: the target's correction, or its bonus


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [..., vocab] that tokens are drawn from; temperature, top-k, then top-p."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest_kept, -torch.inf)
    probabilities = scores.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ranked, order = probabilities.sort(dim=-1, descending=True)
        # A token is kept while those before it do not reach top_p; the first is always kept.
        ranked = ranked * (ranked.cumsum(dim=-1) - ranked < sampling.top_p)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ranked)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One token [...] from each distribution [..., vocab]; weights need not sum to one."""
    flat = probabilities.flatten(0, -2)
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token [...] from each row of logits [..., vocab], greedily or drawn."""
    if sampling.is_greedy:
        return logits.argmax(dim=-1)
    return draw(distribution(logits, sampling), generator)


def verify_greedy(drafts: Tensor, target_logits: Tensor) -> Verdict:
    """Check drafts [batch, K] against the target's logits [batch, K+1, vocab].

    `target_logits[:, k]` is for the position of draft k; the last row is for the position after all
    drafts.
    """
    choices = target_logits.argmax(dim=-1)  # [batch, K+1]
    accepted = _leading_run(drafts == choices[:, :-1])
    return Verdict(accepted, _at(choices, accepted))


def verify_sampled(
    drafts: Tensor,
    target_probabilities: Tensor,
    draft_probabilities: Tensor | None,
    generator: torch.Generator,
) -> Verdict:
    """Check drafts [batch, K] against the target's distributions [batch, K+1, vocab].

    `draft_probabilities` [batch, K, vocab] is the distribution of the drafts; None means that they
    are greedy.
    """
    count = drafts.shape[1]
    p = _at(target_probabilities[:, :count], drafts)  # [batch, K]
    q = torch.ones_like(p) if draft_probabilities is None else _at(draft_probabilities, drafts)
    uniform = torch.rand(p.shape, generator=generator, device=p.device)
    accepted = _leading_run(uniform * q < p)

    at_end = _at(target_probabilities, accepted)  # [batch, vocab]
    rejected = accepted < count  # [batch]
    if bool(rejected.any()):
        place = accepted.clamp(max=count - 1)
        if draft_probabilities is None:
            taken = torch.zeros_like(at_end).scatter(1, _at(drafts, place)[:, None], 1.0)
        else:
            taken = _at(draft_probabilities, place)
        residual = (at_end - taken).clamp(min=0.0)
        # An empty residual means that p and q are equal up to rounding; then draw from p.
        usable = rejected & (residual.sum(dim=-1) > 0)
        at_end = torch.where(usable[:, None], residual, at_end)
    return Verdict(accepted, draw(at_end, generator))


def _leading_run(accepted: Tensor) -> Tensor:
    """Number of true entries in each row [batch, K] before the first false one."""
    return accepted.int().cumprod(dim=1).sum(dim=1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Entry `index` of each row, along the first dimension of `values` past those of `index`."""
    picked = index.dim()
    shape = (*index.shape, 1, *values.shape[picked + 1 :])
    wide = index.view(*index.shape, *(1,) * (values.dim() - picked)).expand(shape)
    return values.gather(picked, wide).squeeze(picked)

"""What an in-process engine drafts, and what the reference drafts at the same places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from leadout.dflash.drafter import Drafter
from leadout.dflash.propose import BlockProposer
from leadout.dflash.target import Target


@dataclass(frozen=True)
class EngineDraft:
    """One block of drafts: made when the request's text had this many tokens, anchor included."""

    request: str
    length: int
    tokens: tuple[int, ...]


def record_drafts(llm: Any) -> list[EngineDraft]:
    """Fills the returned list with every block that this in-process engine drafts from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    take_over = scheduler.update_draft_token_ids
    recorded: list[EngineDraft] = []

    def listen(drafts: Any) -> None:
        for request, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if request in scheduler.requests:
                length = scheduler.requests[request].num_tokens
                recorded.append(EngineDraft(request, length, tuple(tokens)))
        take_over(drafts)

    scheduler.update_draft_token_ids = listen  # this one engine's scheduler, not vLLM's class
    return recorded


@torch.no_grad()
def reference_drafts(
    target: Target, drafter: Drafter, text: list[int], lengths: list[int], count: int
) -> list[tuple[int, ...]]:
    """The reference's drafts for the same text, at each of these ascending lengths."""
    states = target.states(torch.tensor([text]))
    proposer = BlockProposer(drafter, target, batch=1)
    committed = 0
    drafts = []
    for length in lengths:
        new = states[:, committed : length - 1]  # all but the anchor, which is text[length - 1]
        proposer.commit(new, torch.tensor([new.shape[1]]))
        committed = length - 1
        proposal = proposer.propose(torch.tensor([text[length - 1]]), count)
        drafts.append(tuple(proposal.tokens[0].tolist()))
    return drafts

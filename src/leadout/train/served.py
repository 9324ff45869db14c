"""Acceptance of a drafter in vLLM, compared with what validation predicts.

The prediction is made for the texts that vLLM wrote, so both count the same steps; they differ
only if vLLM and the training code do not compute the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from leadout.checkpoints import load_drafter
from leadout.dflash.target import Target
from leadout.engine.offline import SessionRequest, run_session
from leadout.errors import NEGATIVE, LeadoutError
from leadout.evaluate.acceptance import accepted_drafts, along_decoding, summarise
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.hidden_states import ComputedStates, load_model
from leadout.evaluate.target_weights import TargetFiles, load_target_weights

MAX_DIFFERENCE = 0.05


class ServedDiffersError(LeadoutError):
    """vLLM accepts more or fewer drafts than validation predicts."""

    exit_code = NEGATIVE


class ServedAcceptance(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: int
    max_tokens: int
    draft_tokens: int
    served: float  # acceptance length by vLLM's counters
    served_by_position: list[float]
    served_steps: int
    predicted: float  # by validation, for the same texts
    predicted_steps: int

    @property
    def difference(self) -> float:
        return abs(self.predicted - self.served) / self.served


def compare_with_served(
    target: Path,
    drafter: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    max_length: int,
    precision: torch.dtype,
) -> ServedAcceptance:
    """Decode greedily in vLLM with the largest K, then predict for the same texts."""
    model = load_drafter(drafter, precision)
    size = model.config.block_size
    request = SessionRequest(
        target=str(target),
        drafter=str(drafter),
        draft_tokens=size - 1,
        prompts={"held out": [list(prompt) for prompt in prompts]},
        max_tokens=max_tokens,
        max_length=max_length,
        dtype=str(precision).removeprefix("torch."),
    )
    (served,) = run_session(request).runs
    sequences = [
        TrainingSequence(str(number), "served", torch.tensor([*prompt, *answer]), len(prompt))
        for number, (prompt, answer) in enumerate(zip(prompts, served.answers, strict=True))
    ]
    weights = load_target_weights(TargetFiles(target), precision, torch.device("cpu"))
    drafts = accepted_drafts(
        BlockForward(model, weights.embedding),
        weights,
        ComputedStates(
            lambda: Target(load_model(target, precision), model.config.target_layer_ids)
        ),
        list(enumerate(sequences)),
        size,
    )
    return ServedAcceptance(
        prompts=len(prompts),
        max_tokens=max_tokens,
        draft_tokens=size - 1,
        served=served.acceptance_length,
        served_by_position=[n / max(served.steps, 1) for n in served.accepted_by_position],
        served_steps=served.steps,
        predicted=summarise(drafts, size).overall.acceptance_length,
        predicted_steps=sum(len(along_decoding(each.counts)) for each in drafts),
    )


def require_agreement(acceptance: ServedAcceptance, drafter: Path) -> None:
    if acceptance.served_steps == 0:
        raise ServedDiffersError(
            f"{drafter}: vLLM decoded {acceptance.prompts} prompts without a single draft. "
            "Do not deploy this drafter before the cause is found."
        )
    if acceptance.difference > MAX_DIFFERENCE:
        raise ServedDiffersError(
            f"{drafter}: the acceptance length in vLLM is {acceptance.served:.3f}, but validation "
            f"predicts {acceptance.predicted:.3f} for the same texts. They differ by "
            f"{acceptance.difference:.1%}, expected at most {MAX_DIFFERENCE:.0%}: vLLM and "
            "training do not compute the same drafts. Do not deploy this drafter before the cause "
            "is found."
        )

"""How the workers of a running server are set up, and what they draft: for `leadout selftest`.

vLLM mixes one of the extensions into its worker class (`worker_extension_cls`). Their methods are
called through vLLM's `/collective_rpc`, which exists only with VLLM_SERVER_DEV_MODE=1. Drafts are
recorded where a model runner calls its drafter, which is outside of captured graphs: a recording
shows what the graphs have computed, under any flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from leadout.checkpoints.store import load_tensors
from leadout.engine.child_process import EngineError
from leadout.engine.hot_swap import SwapExtension
from leadout.engine.step_records import ServerFacts, server_facts
from leadout.engine.vllm_adapter import model_runner
from leadout.engine.vllm_internals import DRAFT_RECORDING, is_usable

INSPECTION = f"{__name__}.InspectionExtension"
INSPECTION_AND_SWAP = f"{__name__}.InspectionAndSwapExtension"
MAX_STEPS = 256  # that one recording keeps


class WorkerFacts(ServerFacts):
    """What vLLM has resolved on one worker."""

    draft_class: str | None  # with its module; None without a drafter
    draft_tokens: int  # K, at most
    device: str


def worker_facts(vllm_config: Any, draft_class: str | None) -> WorkerFacts:
    return WorkerFacts(
        **dict(server_facts(vllm_config)),
        draft_class=draft_class,
        draft_tokens=vllm_config.num_speculative_tokens,
        device=str(vllm_config.device_config.device_type),
    )


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What the drafter got in one step of a request, and what it drafted."""

    positions: Tensor  # [tokens], without rejected drafts; the anchor is at the next position
    states: Tensor  # [tokens, taps * target hidden size]
    anchor: Tensor  # [], the token
    drafts: Tensor  # [K]; none in a step with K = 0


def write_steps(steps: Sequence[DraftStep], path: Path) -> None:
    names = [each.name for each in fields(DraftStep)]
    tensors = {
        f"{number}.{name}": getattr(step, name).contiguous()
        for number, step in enumerate(steps)
        for name in names
    }
    save_file(tensors, path)


def read_steps(path: Path) -> list[DraftStep]:
    tensors = load_tensors(path)
    names = [each.name for each in fields(DraftStep)]
    steps = range(len(tensors) // len(names))
    try:
        return [DraftStep(*(tensors[f"{number}.{name}"] for name in names)) for number in steps]
    except KeyError as problem:
        raise EngineError(
            f"{path} lacks the tensor {problem}, so the engine did not finish writing it. Run the "
            "command again."
        ) from None


class DraftStepRecorder:
    """Keeps the steps of a model runner's drafter, of one request at a time, until `detach`."""

    def __init__(self, runner: Any, runner_version: Literal["V1", "V2"]) -> None:
        self.steps: list[DraftStep] = []
        self._owner = runner.speculator if runner_version == "V2" else runner.drafter
        step_of = step_of_v2 if runner_version == "V2" else step_of_v1
        # Of this one object; the method of the class stays as it is.
        self._owner.propose = partial(self._propose, self._owner.propose, step_of)

    def detach(self) -> None:
        del self._owner.propose  # uncovers the method of the class

    def _propose(self, original: Any, step_of: Any, *arguments: Any, **settings: Any) -> Any:
        drafts = original(*arguments, **settings)
        if len(self.steps) < MAX_STEPS and not settings.get("dummy_run"):
            step = step_of(drafts, *arguments, **settings)
            if step is not None:
                self.steps.append(step)
        return drafts


def step_of_v1(
    drafts: Tensor,
    *,
    num_speculative_tokens: int,
    target_positions: Tensor,
    target_hidden_states: Tensor,
    next_token_ids: Tensor,
    num_rejected_tokens_gpu: Tensor | None = None,
    **_: Any,
) -> DraftStep | None:
    """From what the V1 runner gives its proposer; None for a step of several requests."""
    if len(next_token_ids) != 1:
        return None
    rejected = 0 if num_rejected_tokens_gpu is None else int(num_rejected_tokens_gpu[0])
    kept = len(target_positions) - rejected
    return DraftStep(
        _copied(target_positions[:kept]),
        _copied(target_hidden_states[:kept]),
        _copied(next_token_ids[0]),
        _copied(drafts.reshape(-1)[:num_speculative_tokens]),
    )


def step_of_v2(
    drafts: Tensor,
    input_batch: Any,
    attn_metadata: Any,
    slot_mappings: Any,
    last_hidden_states: Tensor,
    aux_hidden_states: list[Tensor] | None,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    *_: Any,
    num_speculative_tokens: int | None = None,
    **__: Any,
) -> DraftStep | None:
    """From what the V2 runner gives its speculator; None for a step of several requests."""
    if input_batch.num_reqs != 1 or not aux_hidden_states:
        return None
    request = int(input_batch.idx_mapping[0])
    # Between two chunks of a prompt the anchor is the next token of the prompt.
    anchors = last_sampled if int(num_sampled[0]) else next_prefill_tokens
    kept = int(input_batch.num_tokens) - int(num_rejected[0])
    count = drafts.shape[1] if num_speculative_tokens is None else num_speculative_tokens
    return DraftStep(
        _copied(input_batch.positions[:kept]),
        _copied(torch.cat([each[:kept] for each in aux_hidden_states], dim=-1)),
        _copied(anchors[request].reshape(())),
        _copied(drafts[0, :count]),
    )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class InspectionExtension:
    """Methods of a worker; arguments arrive as text.

    leadout_facts()              a `WorkerFacts`
    leadout_record()             start to record the drafter's steps
    leadout_write_record(path)   stop, and write the steps to this file; how many there were
    """

    def leadout_facts(self) -> dict[str, Any]:
        worker: Any = self
        drafter = worker.get_draft_model()
        kind = None if drafter is None else type(drafter)
        name = None if kind is None else f"{kind.__module__}.{kind.__qualname__}"
        return worker_facts(worker.vllm_config, name).model_dump()

    def leadout_record(self) -> None:
        worker: Any = self
        if is_usable(DRAFT_RECORDING):
            version = model_runner(worker.vllm_config)
            self._leadout_recorder = DraftStepRecorder(worker.model_runner, version)

    def leadout_write_record(self, path: str) -> dict[str, int]:
        worker: Any = self
        recorder: DraftStepRecorder | None = self.__dict__.pop("_leadout_recorder", None)
        if recorder is None:
            return {"steps": 0}
        recorder.detach()
        # All ranks draft the same; engines that served another request have no steps.
        if recorder.steps and worker.rank == 0:
            write_steps(recorder.steps, Path(path))
        return {"steps": len(recorder.steps)}


class InspectionAndSwapExtension(SwapExtension, InspectionExtension):
    """For servers whose drafter can be swapped."""

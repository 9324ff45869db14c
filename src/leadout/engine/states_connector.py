"""vLLM's KV connector that writes the hidden states of every request into a folder.

vLLM loads it by name (`kv_connector_module_path`) with its method `extract_hidden_states`, which
keeps the states of some layers in a cache of their own, beside keys and values. They therefore
survive chunked prefill and come out of the prefix cache. Its own connector serves as the base, but
copies through pinned memory, which needs CUDA, and has no limit on what it writes.

The scheduler's side admits a request when its states will fit into the folder; the worker's side,
on tensor-parallel rank 0, writes the file when the request has finished.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadout.engine.settings import STATES, StatesSettings, read_section
from leadout.engine.states_folder import SUFFIX, Backlog, new_name, write_states
from leadout.engine.vllm_adapter import (
    HiddenStatesConnector,
    HiddenStatesMetadata,
    RequestStatus,
    extract_from_kv_cache,
)
from leadout.fp8 import to_fp8

logger = logging.getLogger("vllm.leadout")


class StatesConnector(HiddenStatesConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = read_section(vllm_config, STATES, StatesSettings)
        self._storage_path = str(self._settings.folder)
        self.use_lock = False  # files appear when they are complete
        layers, width = len(self._settings.layer_ids), vllm_config.model_config.get_hidden_size()
        size = width * vllm_config.model_config.dtype.itemsize
        self._token_bytes = layers * (width + 4 if self._settings.fp8 else size) + 8
        self._backlog = Backlog(
            self._settings.folder, self._settings.max_bytes, self._settings.max_seconds
        )

    # The scheduler's side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No tokens are loaded; None makes the scheduler ask again later."""
        size = request.num_prompt_tokens * self._token_bytes
        return (0 if self._backlog.admit(request.request_id, size) else None), False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = HiddenStatesMetadata()
        meta.pending_saves = list(self._pending_saves.values())
        self._pending_saves.clear()
        for each in scheduler_output.scheduled_new_reqs:
            path = Path(self._storage_path) / f"{new_name()}{SUFFIX}"
            self._request_filenames.setdefault(each.req_id, str(path))
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        is_delayed, parameters = super().request_finished(request, block_ids)
        if parameters is not None:
            path = Path(parameters["hidden_states_path"])
            parameters = {"states": path.stem, "hidden_states_path": str(path)}
        return is_delayed, parameters

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Any]:
        found: tuple[bool, Any] = (False, None)
        if request.status == RequestStatus.FINISHED_ABORTED:  # nobody waits for its states
            self._request_filenames.pop(request.request_id, None)
        else:
            found = super().request_finished_all_groups(request, block_ids)
        if not found[0]:  # no file will be written
            self._backlog.release(request.request_id)
        return found

    def update_connector_output(self, connector_output: Any) -> None:
        for request in connector_output.finished_sending or ():
            self._backlog.release(request)

    # The worker's side

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        tensors, copied = self._copy(pending)
        path, limit = Path(pending.filename), self._settings.max_bytes
        future = self._executor.submit(_write_when, copied, path, tensors, limit)
        self._req_futures[pending.req_id] = future
        # The request counts as sent, and its blocks are freed, once the file is written.
        self._req_copy_events[pending.req_id] = _Written(future)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        for request in sent or ():
            problem = self._req_futures.pop(request).exception()
            if problem is not None:
                logger.error("Leadout could not write hidden states: %r", problem)
        return sent, received

    def _copy(self, pending: Any) -> tuple[dict[str, Tensor], Any]:
        """The tensors of a file in host memory, and the CUDA event after which they are there."""
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = torch.arange(self._block_size) + blocks[:, None] * self._block_size
        cache, count = self._kv_cache, len(pending.token_ids)
        if cache.device.type != "cuda":
            return self._tensors(cache, slots.flatten(), pending.token_ids, count), None
        stream, ready = self._get_copy_stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            on_device = slots.flatten().to(cache.device, non_blocking=True)
            found = self._tensors(cache, on_device, pending.token_ids, count)
            tensors = {
                name: each if each.device.type == "cpu" else _to_pinned(each)
                for name, each in found.items()
            }
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
        return tensors, copied

    def _tensors(
        self, cache: Tensor, slots: Tensor, token_ids: Tensor, count: int
    ) -> dict[str, Tensor]:
        states = extract_from_kv_cache(cache, slots, count)  # [tokens, layers, H], a copy
        layers = torch.tensor(self._settings.layer_ids)
        found = {"states": states.contiguous(), "tokens": token_ids, "layers": layers}
        if self._settings.fp8:
            found["states"], found["scales"] = to_fp8(states)
        return found


def _to_pinned(tensor: Tensor) -> Tensor:
    """A copy in host memory that is complete when the current stream gets there."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class _Written:
    """In the place of a CUDA event: complete when the file is written."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def query(self) -> bool:
        return self._future.done()


def _write_when(copied: Any, path: Path, tensors: dict[str, Tensor], limit: int) -> None:
    if copied is not None:
        copied.synchronize()
    write_states(path, tensors, limit)

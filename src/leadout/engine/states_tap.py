"""The worker's part of learning from served states: copies the tapped states into a ring.

In every step vLLM hands the target's tapped states to its drafter. The worker here, named by
`worker_cls`, gives the runner's proposer (V1) or speculator (V2) a subclass that first copies the
rows of chosen requests, with their tokens and positions. Neither the target's nor the drafter's
CUDA graphs change.

On a GPU the rows are gathered on vLLM's stream, copied to pinned memory on another one, and written
by a thread that waits for the copy. vLLM's stream never waits: if the thread cannot keep up, steps
are dropped and counted. With tensor parallelism all ranks have the same states; the first writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leadout.engine.capture import SECONDS_BETWEEN_COUNTERS
from leadout.engine.counters import remove_small, small_file, write_small
from leadout.engine.fail_safe import FailSafe
from leadout.engine.idle_drafter import IdleDrafterWorker
from leadout.engine.served_texts import PART, StatesCounters, key_of, ring_info
from leadout.engine.settings import LEARN, LEARN_STATES, LearnSettings, read_section, sections_of
from leadout.engine.vllm_adapter import engine_index, is_pin_memory_available
from leadout.engine.vllm_internals import LEARNING, is_usable
from leadout.ring.folder import STATES, open_writer, prepare
from leadout.ring.memory import RingError
from leadout.ring.records import StatesRecord

MAX_IN_FLIGHT = 256 << 20  # bytes that are being copied from a GPU


class Rows(NamedTuple):
    """The rows of chosen requests in a step, one after the other."""

    requests: list[tuple[bytes, int]]  # keys, and how many rows each has
    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    states: Tensor  # [rows, layers * H]

    @property
    def bytes(self) -> int:
        return self.states.nbytes + self.tokens.nbytes + self.positions.nbytes


class RowsWriter:
    """Writes rows that are in this machine's memory into the ring."""

    def __init__(self, settings: LearnSettings) -> None:
        self._info = info = ring_info(settings)
        prepare(settings.folder, info)
        self._ring = open_writer(settings.folder, STATES, settings.max_bytes, info)
        # One long prompt must not push out everything else at once.
        self._max_rows = max(settings.max_bytes // 8 // info.row_bytes, 1)
        self.counters = StatesCounters()

    def write(self, rows: Rows) -> None:
        if rows.states.shape[-1] != self._info.width:
            raise RingError(
                f"The states of a token have {rows.states.shape[-1]} values, expected "
                f"{self._info.width}."
            )
        start = 0
        for key, count in rows.requests:
            first = int(rows.positions[start])
            for at in range(0, count, self._max_rows):
                part = slice(start + at, start + min(at + self._max_rows, count))
                record = StatesRecord(key, first + at, rows.tokens[part], rows.states[part])
                if self._ring.write(record.packed(self._info)):
                    self.counters.written += 1
                else:
                    self.counters.too_large += 1
            start += count

    def close(self) -> None:
        self._ring.close()


@dataclass(frozen=True)
class _Copied:
    rows: Rows  # in pinned memory
    done: Any  # event


class BackgroundCopy:
    """Copies rows from a GPU and hands them to a function, without anybody waiting for it."""

    def __init__(
        self,
        device: Any,
        write: Callable[[Rows], None],
        *,
        max_bytes: int = MAX_IN_FLIGHT,
        pin_memory: bool = True,
    ) -> None:
        """`device` is torch's module of the device: `torch.cuda`, or `torch.xpu`."""
        self._device, self._write, self._max_bytes = device, write, max_bytes
        self._pin_memory = pin_memory
        self._stream = device.Stream()
        self._queue: Queue[_Copied | None] = Queue()  # bounded by `max_bytes`; None ends the thread
        self._lock = threading.Lock()
        self._in_flight = 0
        self._thread = threading.Thread(target=self._run, name="leadout-states", daemon=True)
        self._thread.start()

    def start(self, rows: Rows) -> bool:
        """Begin to copy; False if too much is under way. `rows` are not used by anybody else."""
        with self._lock:
            # Those of one large step alone may be more.
            if self._in_flight and self._in_flight + rows.bytes > self._max_bytes:
                return False
            self._in_flight += rows.bytes
        ready, done = self._device.Event(), self._device.Event(blocking=True)
        ready.record()  # on vLLM's stream, which computes the rows
        with self._device.stream(self._stream):
            self._stream.wait_event(ready)
            copies = [self._copy(each) for each in (rows.tokens, rows.positions, rows.states)]
            done.record()
        self._queue.put(_Copied(Rows(rows.requests, *copies), done))
        return True

    def _copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin_memory)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not reused before the copy has ended
        return host

    def _run(self) -> None:
        while (copied := self._queue.get()) is not None:
            copied.done.synchronize()
            self._write(copied.rows)
            with self._lock:
                self._in_flight -= copied.rows.bytes

    def close(self, seconds: float = 5.0) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)


class StatesTap:
    """Chooses requests and copies their rows in every step."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._settings = read_section(vllm_config, LEARN, LearnSettings)
        self._chosen: dict[str, bytes] = {}  # keys of requests that run, by their ids
        self._fail_safe = FailSafe(PART, on_failure=self.close)
        self._writer: RowsWriter | None = None
        self._background: BackgroundCopy | None = None
        self._counters_path = small_file(
            LEARN_STATES, vllm_config.instance_id, engine_index(vllm_config)
        )
        self._counted_at = 0.0
        with self._fail_safe:
            self._writer = RowsWriter(self._settings)
            if device.type != "cpu":
                self._background = BackgroundCopy(
                    torch.get_device_module(device),
                    self._write,
                    pin_memory=is_pin_memory_available(),
                )

    def begin_step(self, scheduler_output: Any) -> None:
        """Note which of the new requests are chosen, and forget those that have ended."""
        if self._writer is None:
            return
        with self._fail_safe:
            for request_id in scheduler_output.finished_req_ids:
                self._chosen.pop(request_id, None)
            for request in scheduler_output.scheduled_new_reqs:
                key = key_of(self._settings, request.req_id, request)
                if key is not None:
                    self._chosen[request.req_id] = key
            self._count()

    def add(
        self,
        request_ids: Sequence[str],
        starts: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        states: Sequence[Tensor],
    ) -> None:
        """The rows of a step: request i has those from starts[i] to starts[i + 1].

        `states` are [rows, ...], one or several that are to be put side by side.
        """
        if self._writer is None or not self._chosen:
            return
        with self._fail_safe:
            chosen, requests, parts = [], [], []
            for number, request_id in enumerate(request_ids):
                first, last = int(starts[number]), int(starts[number + 1])
                key = self._chosen.get(request_id)
                if key is not None and last > first:
                    chosen.append(request_id)
                    requests.append((key, last - first))
                    parts.append(slice(first, last))
            if not requests:
                return
            if positions.dim() > 1:  # one row for each axis of an image; the same ones for text
                positions = positions[0]
            rows = Rows(
                requests,
                torch.cat([tokens[part] for part in parts]),
                torch.cat([positions[part] for part in parts]),
                torch.cat([torch.cat([each[part] for each in states], -1) for part in parts]),
            )
            if self._background is None:
                self._writer.write(rows)
            elif not self._background.start(rows):
                self._writer.counters.too_slow += len(requests)
                for request_id in chosen:  # the rest of a sequence with a gap is of no use
                    del self._chosen[request_id]

    def _write(self, rows: Rows) -> None:
        """In the thread that waits for copies."""
        writer = self._writer
        if writer is not None:
            with self._fail_safe:
                writer.write(rows)

    def _count(self) -> None:
        now = time.monotonic()
        if self._writer is not None and now - self._counted_at >= SECONDS_BETWEEN_COUNTERS:
            self._counted_at = now
            with suppress(OSError):
                write_small(self._writer.counters, self._counters_path)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        background, self._background = self._background, None
        if background is not None:
            background.close()
        if writer is not None:
            writer.close()
            with suppress(OSError):
                remove_small(self._counters_path)


def tapped_proposer(base: type[Any]) -> type[Any]:
    """A subclass of the V1 runner's DFlash proposer class that copies states first."""

    class TappedProposer(base):  # type: ignore[misc]
        leadout_tap: StatesTap
        leadout_runner: Any

        def propose(self, *arguments: Any, **settings: Any) -> Any:
            if "target_hidden_states" in settings:
                self.leadout_tap.add(
                    self.leadout_runner.input_batch.req_ids,
                    settings["common_attn_metadata"].query_start_loc_cpu.tolist(),
                    settings["target_token_ids"],
                    settings["target_positions"],
                    [settings["target_hidden_states"]],
                )
            return super().propose(*arguments, **settings)

    return TappedProposer


def tapped_speculator(base: type[Any]) -> type[Any]:
    """A subclass of the V2 runner's DFlash speculator class that copies states first."""

    class TappedSpeculator(base):  # type: ignore[misc]
        leadout_tap: StatesTap

        def propose(
            self,
            input_batch: Any,
            attn_metadata: Any,
            slot_mappings: Any,
            last_hidden_states: Any,
            aux_hidden_states: Any,
            *arguments: Any,
            **settings: Any,
        ) -> Any:
            if aux_hidden_states and not settings.get("dummy_run"):
                self.leadout_tap.add(
                    input_batch.req_ids,
                    input_batch.query_start_loc_np,
                    input_batch.input_ids,
                    input_batch.positions,
                    aux_hidden_states,
                )
            return super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                *arguments,
                **settings,
            )

    return TappedSpeculator


def tap(runner: Any, states_tap: StatesTap) -> bool:
    """Whether the drafter of this runner now gives its states to the tap as well."""
    speculator = getattr(runner, "speculator", None)
    if speculator is not None and hasattr(speculator, "_precompute_context_kv"):
        speculator.__class__ = tapped_speculator(type(speculator))
        speculator.leadout_tap = states_tap
        return True
    drafter = getattr(runner, "drafter", None)
    if drafter is not None and hasattr(drafter, "set_inputs_first_pass"):
        drafter.__class__ = tapped_proposer(type(drafter))
        drafter.leadout_tap, drafter.leadout_runner = states_tap, runner
        return True
    return False


class StatesTapWorker(IdleDrafterWorker):
    """vLLM's worker with the drafter of `IdleDrafterWorker`, whose states go into a ring too."""

    _states_tap: StatesTap | None = None

    def init_device(self) -> None:
        super().init_device()
        if LEARN in sections_of(self.vllm_config) and self.is_driver_worker:
            if not is_usable(LEARNING):
                return
            states_tap = StatesTap(self.vllm_config, self.device)
            if tap(self.model_runner, states_tap):
                self._states_tap = states_tap
            else:
                states_tap.close()

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._states_tap is not None:
            self._states_tap.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        if self._states_tap is not None:
            self._states_tap.close()
        super().shutdown()

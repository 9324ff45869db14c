"""Hidden states of a target that runs in vLLM servers, as a source for training and evaluation.

This process holds none of the target but what it asks for: its final norm, and, for scores, its
output head. States arrive before the final norm, which is applied here once.

Texts that will be needed can be announced: they are fetched in the background, a bounded number at
a time, so that the servers work while the drafter is trained.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from leadout.dflash.target import Observation
from leadout.engine.states_folder import States, StatesError
from leadout.evaluate.hidden_states import Indexed
from leadout.evaluate.states_client import ClientSettings, StatesServers
from leadout.evaluate.target_weights import TargetFiles, load_final_norm
from leadout.models import fingerprint

THREADS_PER_SERVER = 8
# Texts that are fetched or wait for the trainer: enough to keep the servers busy, and a bound on
# memory of this many times the states of one text.
MAX_AHEAD_PER_SERVER = 16

_Key = tuple[int, str]  # index and name of a sample


class ServedStates:
    """A `StateSource` over servers; the layers are those of `layer_ids`, in this order."""

    def __init__(
        self,
        servers: StatesServers,
        layer_ids: Sequence[int],
        norm: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._servers = servers
        self._layer_ids = tuple(layer_ids)
        self._norm = norm
        self._dtype, self._device = dtype, device
        count = len(servers.servers)
        self._max_ahead = MAX_AHEAD_PER_SERVER * count
        self._pool = ThreadPoolExecutor(THREADS_PER_SERVER * count, "leadout-states")
        self._lock = threading.Lock()
        self._fetched: dict[_Key, Future[States]] = {}
        self._announced: deque[Indexed] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what was announced and close the connections."""
        with self._lock:
            self._announced.clear()
        self._servers.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def announce(self, sequences: Iterable[Indexed]) -> None:
        """Fetch these texts in the background, in this order."""
        with self._lock:
            self._announced.extend(sequences)
            self._fetch_ahead()

    def can_read(self, _sequences: Sequence[Indexed]) -> bool:
        """Nothing is computed here: any thread may observe ahead of the training loop."""
        return True

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        """States [rows, longest, taps * H] and normed final states [rows, longest, H]."""
        futures = [self._take(item) for item in sequences]
        found = [future.result() for future in futures]
        longest = max(len(sequence) for _, sequence in sequences)
        width = found[0].states.shape[-1]
        taps = len(self._layer_ids)
        shape = (len(found), longest)
        states = torch.zeros(*shape, taps * width, dtype=self._dtype, device=self._device)
        last = torch.zeros(*shape, width, dtype=self._dtype, device=self._device)
        for row, each in enumerate(found):
            place = {layer: number for number, layer in enumerate(each.layer_ids)}
            missing = [layer for layer in self._layer_ids if layer not in place]
            if missing:
                raise StatesError(
                    f"A server handed out the layers {each.layer_ids}, but {missing} are needed. "
                    f"Start it with --layers for each of {list(self._layer_ids)}."
                )
            tapped = each.states[:, [place[layer] for layer in self._layer_ids]]
            states[row, : len(tapped)] = tapped.flatten(1).to(self._device, self._dtype)
            last[row, : len(tapped)] = each.states[:, -1].to(self._device, self._dtype)
        with torch.no_grad():
            final: Tensor = self._norm(last)
        return Observation(states, final)

    def _take(self, item: Indexed) -> Future[States]:
        """The text's states, being fetched; makes room for the next announced text."""
        with self._lock:
            future = self._fetched.pop(_key(item), None)
            if future is None:
                # Not announced, or still far back in the queue: it is needed now.
                self._announced = deque(i for i in self._announced if _key(i) != _key(item))
                future = self._submit(item)
            self._fetch_ahead()
            return future

    def _fetch_ahead(self) -> None:
        while self._announced and len(self._fetched) < self._max_ahead:
            item = self._announced.popleft()
            if _key(item) not in self._fetched:
                self._fetched[_key(item)] = self._submit(item)

    def _submit(self, item: Indexed) -> Future[States]:
        return self._pool.submit(self._servers.compute, item[1].tokens.tolist())


def _key(item: Indexed) -> _Key:
    index, sequence = item
    return index, sequence.name


@contextmanager
def states_from(
    urls: Sequence[str],
    target: Path,
    layer_ids: Sequence[int],
    *,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    settings: ClientSettings | None = None,
    exact: bool = False,
) -> Iterator[ServedStates]:
    """States of `target` from running servers, which must fit; `longest` is that of the texts.

    With `exact`, servers of states in FP8 are refused.
    """
    with StatesServers(urls, settings) as servers:
        servers.require(fingerprint(target), layer_ids, longest, exact=exact)
        norm = load_final_norm(TargetFiles(target), dtype, device)
        with ServedStates(servers, layer_ids, norm, dtype, device) as source:
            yield source

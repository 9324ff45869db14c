"""The target's states of replayed data, computed once and kept in the work folder.

Cycles that learn from served states need states of the original data as well. That is public text,
so its states may be kept on disk. They are computed by a child process, `python -m
leadout.learn.base_states`, which holds the target only for as long as that takes; the learner never
does. They are used again as long as target, layers, precision and data are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from leadout.console import Progress
from leadout.data.manifest import DataFolder
from leadout.dflash.target import Observation, Target
from leadout.engine.child_process import Child, Message, Report, answer_requests
from leadout.evaluate.blocks import to_sequence
from leadout.evaluate.hidden_states import (
    ComputedStates,
    Indexed,
    StatesOnDisk,
    StateSource,
    announce,
    compute_dtype,
    load_model,
)
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.reference import reference_device
from leadout.files import FileError, read_model, write_text
from leadout.learn.config import LearnError
from leadout.learn.work_folder import remove_folder
from leadout.shards import SampleSet
from leadout.train.config import TrainConfig
from leadout.train.run import STATES
from leadout.train.states_source import served_states

INFO = "base.json"


class BaseRequest(Message):
    """Which states to compute, and where from; also the request to the child process."""

    target: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    precision: Literal["bfloat16", "float32"]
    data: str
    indices: tuple[int, ...]  # of the data's samples
    max_length: int
    folder: str
    states_from: tuple[str, ...] = ()
    vllm_flags: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.precision)
        return found

    def open(self, samples: SampleSet, source: StateSource) -> StatesOnDisk:
        """The file of states; those that are missing come from `source`."""
        facts = [samples.facts[index] for index in self.indices]
        return StatesOnDisk(
            Path(self.folder) / STATES,
            source,
            [min(each.prompt_length + each.response_length, self.max_length) for each in facts],
            taps=len(self.layer_ids),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
        )


class BaseInfo(Message):
    """What the file of states is for."""

    target_fingerprint: str
    layer_ids: tuple[int, ...]
    precision: str
    max_length: int
    samples: str  # a hash of their ids and of the data


class _Made(Message):
    sequences: int


class _Missing:
    """The source behind states that must all be in the file."""

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        raise LearnError(
            f"The states of {sequences[0][1].name} are not in the work folder. Delete its folder "
            "`base`; they are then computed again."
        )


class BaseStates:
    """A `StateSource` for the samples of a request, by name."""

    def __init__(self, request: BaseRequest, target_fingerprint: str) -> None:
        """Keeps what the folder has of the same states, and removes others."""
        replay = DataFolder(Path(request.data))
        samples = replay.samples()
        self._request = request
        names = [samples.facts[index].id for index in request.indices]
        content = "\n".join([replay.content_hash(), *names])
        info = BaseInfo(
            target_fingerprint=target_fingerprint,
            layer_ids=request.layer_ids,
            precision=request.precision,
            max_length=request.max_length,
            samples=hashlib.sha256(content.encode()).hexdigest(),
        )
        folder = Path(request.folder)
        if not _has(folder, info):
            remove_folder(folder)
            folder.mkdir(parents=True, mode=0o700)
            write_text(folder / INFO, info.model_dump_json(indent=2) + "\n")
        self._places = {name: place for place, name in enumerate(names)}
        self._states = request.open(samples, _Missing())

    @property
    def indices(self) -> tuple[int, ...]:
        """Of the data's samples."""
        return self._request.indices

    def compute(self, progress: Progress) -> None:
        """Compute what is missing, in a child process that has ended afterwards."""
        missing = sum(not self._states.has_all([place]) for place in self._places.values())
        if not missing:
            return
        self._states.require_room()
        total = len(self._places)
        advance = progress.stage("states of replayed data", total, done=total - missing)
        with Child("leadout.learn.base_states", name="The process that computes states") as child:
            child.call(self._request, _Made, lambda _: advance())

    def close(self) -> None:
        self._states.close()

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        return self._states.observe(self._placed(sequences))

    def can_read(self, sequences: Sequence[Indexed]) -> bool:
        return self._states.can_read(self._placed(sequences))

    def _placed(self, sequences: Iterable[Indexed]) -> list[Indexed]:
        return [(self._places[sequence.name], sequence) for _, sequence in sequences]


def _has(folder: Path, info: BaseInfo) -> bool:
    try:
        return read_model(folder / INFO, BaseInfo) == info
    except FileError:  # none, or of another version of Leadout
        return False


def _compute(request: BaseRequest, report: Report) -> _Made:
    target, precision = Path(request.target), request.dtype
    samples = DataFolder(Path(request.data)).samples()
    items = [
        (place, to_sequence(samples[index], request.max_length))
        for place, index in enumerate(request.indices)
    ]
    device = reference_device(target, precision, request.vllm_flags)
    computed = compute_dtype(precision, device)
    where = TrainConfig(states_from=request.states_from, precision=request.precision)
    longest = max(len(sequence) for _, sequence in items)
    with served_states(
        target, request.layer_ids, where, longest, Ranks(0, 1, device), request.vllm_flags
    ) as served:
        source = served or ComputedStates(
            lambda: Target(load_model(target, computed).to(device), request.layer_ids)
        )
        states = request.open(samples, source)
        missing = [item for item in items if not states.has_all([item[0]])]
        announce(source, missing)
        for item in missing:
            states.fill([item])
            report("1")
        states.close()
    return _Made(sequences=len(items))


if __name__ == "__main__":
    answer_requests(BaseRequest, _compute)

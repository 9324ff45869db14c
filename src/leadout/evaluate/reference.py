"""The target as the reference that drafters are compared with: its hidden states and its scores.

`reference_target` loads it in transformers, or, where that is not possible, takes both from vLLM:
a target that does not fit into memory, or whose weights are quantized, which transformers would
compute with other kernels than the engine. Of a served target this process holds the output head
only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from leadout.checkpoints.store import read_header, weight_files
from leadout.dflash.target import Observation
from leadout.engine.load_test import flag_value
from leadout.engine.server_turns import available_bytes
from leadout.engine.states_server import states_server
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.hidden_states import (
    Indexed,
    LoadedTarget,
    ReferenceTarget,
    StateSource,
    load_model,
)
from leadout.evaluate.served_states import ServedStates, states_from
from leadout.evaluate.target_weights import TargetFiles, TargetWeights, load_target_weights
from leadout.pairing.target import read_any_config

# Of the memory that is free, what a target may take: texts and their states need some, too.
MEMORY_SHARE = 0.8
_QUANTIZED = ("quantization_config", "compression_config")  # in config.json
_MODELOPT = "hf_quant_config.json"  # where earlier versions of ModelOpt say it


class ServedTarget:
    """A target in servers of hidden states, which extract at least `layer_ids`."""

    def __init__(
        self, states: ServedStates, layer_ids: Sequence[int], weights: TargetWeights
    ) -> None:
        self._states = states
        self._layer_ids = tuple(layer_ids)
        self._weights = weights
        self._asked = 0

    def source(self, layer_ids: Sequence[int]) -> StateSource:
        return _Layers(self._states, self._layer_ids, tuple(layer_ids))

    def next_logits(self, tokens: Sequence[int], last_portion: int = 0) -> Tensor:
        if 0 < last_portion < len(tokens):
            # The server then finds the first portion in its prefix cache, up to whole blocks.
            self._final(tokens[:-last_portion])
        final = self._final(tokens)
        head = self._weights.head
        return self._weights.scaling.apply(F.linear(final.to(head.dtype), head).float()).cpu()

    def _final(self, tokens: Sequence[int]) -> Tensor:
        self._asked += 1
        sequence = TrainingSequence(f"text {self._asked}", "", torch.tensor(list(tokens)), 1)
        return self._states.observe([(-self._asked, sequence)]).final[0, -1]


class _Layers:
    """Some of the layers that servers extract."""

    def __init__(
        self, states: ServedStates, extracted: tuple[int, ...], layer_ids: tuple[int, ...]
    ) -> None:
        self._states = states
        self._places = [extracted.index(layer) for layer in layer_ids]

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        states, final = self._states.observe(sequences)
        parts = torch.split(states, final.shape[-1], dim=-1)
        return Observation(torch.cat([parts[place] for place in self._places], dim=-1), final)


@contextmanager
def reference_target(
    target: Path,
    layer_ids: Iterable[int],
    precision: torch.dtype,
    *,
    longest: int,
    device: torch.device | None = None,
    urls: Sequence[str] = (),
    served: bool = False,
    vllm_flags: Sequence[str] = (),
    exact: bool = False,
) -> Iterator[ReferenceTarget]:
    """The target in this precision, for texts of up to `longest` tokens.

    With `urls` it is that of running servers; else it is loaded here, or served by a server of
    its own, started with `vllm_flags`, if `served` or if `why_not_loaded` gives a reason. For a
    GPU as the device that was asked before, by `reference_device`.
    With `exact`, running servers of states in FP8 are refused.
    """
    device = device or torch.device("cpu")
    if not urls and not served and device.type == "cpu":
        # One that does not fit on a GPU would take hours on the processor beside it. On a GPU it
        # was found to fit, before other weights took some of its memory.
        gpu = torch.device("cuda") if torch.cuda.is_available() else None
        served = why_not_loaded(target, precision, gpu, vllm_flags) is not None
    if not urls and not served:
        yield LoadedTarget(load_model(target, precision).to(device))
        return
    layers = sorted(set(layer_ids))
    with ExitStack() as opened:
        if not urls:
            dtype = str(precision).removeprefix("torch.")
            server = states_server(
                target, layers, longest=longest, dtype=dtype, vllm_flags=vllm_flags
            )
            urls = [opened.enter_context(server)]
        source = states_from(
            urls, target, layers, longest=longest, dtype=precision, device=device, exact=exact
        )
        states = opened.enter_context(source)
        weights = load_target_weights(TargetFiles(target), precision, device)
        yield ServedTarget(states, layers, weights)


def reference_device(
    target: Path, precision: torch.dtype, vllm_flags: Sequence[str] = ()
) -> torch.device:
    """The device for a reference: the GPU, if there is one and the target can be loaded on it.

    A target that cannot be loaded is served, and its server needs the GPU for itself.
    """
    gpu = torch.device("cuda")
    if torch.cuda.is_available() and why_not_loaded(target, precision, gpu, vllm_flags) is None:
        return gpu
    return torch.device("cpu")


def why_not_loaded(
    target: Path,
    precision: torch.dtype,
    device: torch.device | None = None,
    vllm_flags: Sequence[str] = (),
) -> str | None:
    """Why the target cannot be loaded in transformers, to run on `device`; None if it can.

    `vllm_flags` are those of the engines that it is compared with.
    """
    if is_quantized(target, vllm_flags):
        return "its weights are quantized"
    needed, free = loaded_bytes(target, precision), available_bytes()
    if device is not None and device.type == "cuda":
        # It is read into the memory of the machine first, so it must fit into both.
        free = min(free, torch.cuda.mem_get_info(device)[0])
    if needed > MEMORY_SHARE * free:
        return f"it needs {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free"
    return None


def is_quantized(target: Path, vllm_flags: Sequence[str] = ()) -> bool:
    """Whether vLLM computes with quantized weights: by the target's files, or by these flags."""
    if flag_value(vllm_flags, "--quantization", "-q") is not None:
        return True
    if (target / _MODELOPT).is_file():
        return True
    config = read_any_config(target)
    sections = [config, *(each for each in config.values() if isinstance(each, dict))]
    return any(section.get(name) for section in sections for name in _QUANTIZED)


def rounding_of(
    target: Path, precision: torch.dtype, vllm_flags: Sequence[str] = ()
) -> torch.dtype:
    """The type whose rounding explains how far two computations of the target are apart.

    Kernels for quantized weights often round what they read to 8 bits, in every layer and whatever
    the precision is. A difference in the last bit of float32, as another number of tokens in a
    step makes it, then moves single values to the next level, which is as far away as in bfloat16.
    """
    return torch.bfloat16 if is_quantized(target, vllm_flags) else precision


def loaded_bytes(target: Path, precision: torch.dtype) -> int:
    """The memory that a target takes in this precision, from the headers of its files."""
    tensors = (each for path in weight_files(target) for each in read_header(path))
    return sum(math.prod(each.shape) for each in tensors) * precision.itemsize

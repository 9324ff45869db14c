"""What training costs by arithmetic: floating-point operations, memory, and bytes between machines.

Everything follows from the sizes of target and drafter, so that runs can be planned for targets
that are not at hand. `leadout train --plan` adds what can be measured; docs/scale.md has tables for
large targets, made with the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leadout.pairing import DraftShape, TargetSizes, shape_for
from leadout.pairing.devices import H100, PREFILL_SHARE, Device

BFLOAT16, FLOAT32, FLOAT8 = 2, 4, 1
SCALE_BYTES = 4  # of one FP8 state: a float32 scale for each token and layer
GIB = 2**30

StatesSource = Literal["in process", "disk", "served"]


@dataclass(frozen=True, slots=True)
class Work:
    """The drafter and the training text, as far as costs depend on them."""

    target: TargetSizes
    shape: DraftShape
    layers: int
    taps: int
    block_size: int
    anchors: int  # per sequence
    length: float  # mean tokens of a sequence
    candidates: int | None = None  # tokens with scores (None: the whole vocabulary)

    @classmethod
    def of(
        cls,
        target: TargetSizes,
        *,
        layers: int,
        taps: int,
        block_size: int,
        anchors: int,
        length: float,
        mlp_width: int | None = None,
        candidates: int | None = None,
    ) -> Work:
        """For a new drafter of the shape that `leadout train` chooses."""
        shape = shape_for(target, mlp_width)
        return cls(target, shape, layers, taps, block_size, anchors, length, candidates)

    @property
    def parameters(self) -> int:
        return self.shape.parameters(self.layers, self.taps)

    # Operations for one sequence. A product with n weights takes 2 n operations for each token, its
    # gradients twice as many again.

    @property
    def target_operations(self) -> float:
        """One pass of the target: its states, without the output head."""
        head = self.target.vocab_size * self.target.hidden_size
        return 2.0 * (self.target.active_parameters - head) * self.length

    @property
    def context_operations(self) -> float:
        """Features, keys and values of the context, which all blocks of a sequence share."""
        shape = self.shape
        keys = self.layers * 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
        return 6.0 * self.length * (self.taps * shape.hidden_size**2 + keys)

    @property
    def operations_per_block(self) -> float:
        """The drafter's layers, and scores of drafts and teacher."""
        shape, slots = self.shape, self.block_size
        attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
        layer = attention + 3 * shape.hidden_size * shape.mlp_width
        scores = 2 * shape.num_heads * shape.head_dim * (self.length + slots)
        tokens = min(self.candidates or self.target.vocab_size, self.target.vocab_size)
        head = (slots - 1) * tokens * self.target.hidden_size
        return 6.0 * (slots * self.layers * (layer + scores) + head)

    def operations(self, source: StatesSource) -> float:
        """Of the trainer, for one sequence."""
        own = self.context_operations + self.anchors * self.operations_per_block
        return own + (self.target_operations if source == "in process" else 0.0)

    # Memory in bytes.

    def weight_bytes(
        self, *, optimizer: str = "muon", precision: str = "bfloat16", shards: int = 1
    ) -> float:
        """Weights, gradients and optimizer state of the drafter on one device.

        `shards` is the number of devices that share them (1: each has all).
        """
        momentum = 1 if optimizer == "muon" else 2
        each = FLOAT32 * (2 + momentum)
        if precision == "bfloat16":
            each += 2 * BFLOAT16  # the copy that computes, and its gradients
        return self.parameters * each / shards

    def target_bytes(self, source: StatesSource, *, bytes_per_weight: float = BFLOAT16) -> float:
        """What a trainer holds of the target: embedding, head and norm, or all of it as well."""
        held = self.target.embedding_parameters
        if source != "served":
            held += self.target.parameters
        return held * bytes_per_weight

    @property
    def checkpoint_bytes(self) -> float:
        """Of a run: float32 weights, their best version, and at most two optimizer states."""
        return self.parameters * 4.0 * FLOAT32

    # States of the target.

    def state_bytes_per_token(self, bytes_per_value: int = BFLOAT16) -> int:
        """Tapped layers and the final state; FP8 with a scale for each token and layer."""
        states = self.taps + 1
        scales = states * SCALE_BYTES if bytes_per_value == FLOAT8 else 0
        return states * self.target.hidden_size * bytes_per_value + scales


# Assumptions of estimates on paper: the share of a device's operations that a trainer reaches, and
# bytes per second between machines, for each device.
TRAINING_SHARE = 0.3
NETWORK = 50e9
GPUS_PER_NODE = 8
# Of a device's memory: the rest is for activations, KV cache and fragmentation.
WEIGHTS_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices that serve states and devices that train, and what limits them."""

    work: Work
    device: Device
    servers: int  # devices; 0: the trainers compute the states themselves
    trainers: int
    bytes_per_value: int = BFLOAT16
    prefill_share: float = PREFILL_SHARE
    training_share: float = TRAINING_SHARE
    network: float = NETWORK

    @property
    def source(self) -> StatesSource:
        return "served" if self.servers else "in process"

    @property
    def trained_tokens_per_second(self) -> float:
        """If states arrive in time."""
        rate = self.trainers * self.device.operations * self.training_share
        if self.servers:
            return rate * self.work.length / self.work.operations("served")
        # The target's pass runs at the rate of a server's.
        target = self.work.target_operations / self.prefill_share
        drafter = self.work.operations("served") / self.training_share
        seconds = (target + drafter) / (self.trainers * self.device.operations)
        return self.work.length / seconds

    @property
    def served_tokens_per_second(self) -> float:
        rate = self.servers * self.device.operations * self.prefill_share
        return rate * self.work.length / self.work.target_operations

    @property
    def network_tokens_per_second(self) -> float:
        """What the trainers' own network links can take in."""
        bytes_per_token = self.work.state_bytes_per_token(self.bytes_per_value)
        return min(self.servers, self.trainers) * self.network / bytes_per_token

    @property
    def tokens_per_second(self) -> float:
        return min(self._limits().values())

    @property
    def bottleneck(self) -> str:
        limits = self._limits()
        return min(limits, key=lambda name: limits[name])

    @property
    def bytes_per_second(self) -> float:
        """Between servers and trainers."""
        if not self.servers:
            return 0.0
        return self.tokens_per_second * self.work.state_bytes_per_token(self.bytes_per_value)

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 3600

    def _limits(self) -> dict[str, float]:
        if not self.servers:
            return {"trainers": self.trained_tokens_per_second}
        return {
            "trainers": self.trained_tokens_per_second,
            "state servers": self.served_tokens_per_second,
            "network": self.network_tokens_per_second,
        }


def devices_for_weights(weight_bytes: float, device: Device = H100) -> int:
    """The smallest power of two of devices that hold the weights."""
    count = 1
    while weight_bytes > count * device.memory * WEIGHTS_SHARE:
        count *= 2
    return count


def best_layout(
    work: Work,
    devices: int,
    *,
    server_size: int,
    device: Device = H100,
    bytes_per_value: int = BFLOAT16,
) -> Layout:
    """The split of devices over servers of `server_size` and trainers with the highest rate."""
    layouts = [
        Layout(work, device, servers, devices - servers, bytes_per_value)
        for servers in range(server_size, devices, server_size)
    ]
    if not layouts:
        raise ValueError(f"{devices} devices do not hold a server of {server_size} and a trainer")
    return max(layouts, key=lambda layout: layout.tokens_per_second)

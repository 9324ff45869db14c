"""Whether drafting pays, by arithmetic: seconds of a decoding step from sizes and data sheets.

A step reads weights and the cache of its requests, and computes with every token that it has:

    seconds(bytes, operations) = bytes / bandwidth + operations / rate

or the larger of the two terms, if the device reads while it computes (`overlaps`). A step with
drafts verifies 1 + K tokens of each request and drafts the next ones:

    step(b, K)       = verify(b, 1 + K) + draft(b)
    break_even(b, K) = step(b, K) / verify(b, 1)
    speed_up         = acceptance length / break_even(b, K)

Nothing is measured here, and launching kernels, sampling, scheduling and communication between
devices are left out. `leadout tune` measures the same quantities (`leadout.control.cost_model`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leadout.pairing.devices import BANDWIDTH_SHARE, PREFILL_SHARE, Device
from leadout.pairing.sizes import TargetSizes, shape_for


def acceptance_length(probability: float, k: int) -> float:
    """Tokens per step if each of k drafts is accepted with this probability, given those before."""
    if not 0 <= probability <= 1:
        raise ValueError(f"the probability of acceptance is {probability}, expected 0 to 1")
    return sum(probability**position for position in range(k + 1))


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Seconds of decoding with a target and a drafter of the shape that `leadout train` chooses.

    With several devices that share the weights, all terms are divided by their number, so that
    break-even and speed-up are those of one.
    """

    target: TargetSizes
    device: Device
    draft_layers: int = 5
    taps: int = 5
    block_size: int = 8
    context: int = 2000  # tokens of each request in the cache
    weight_bytes: float = 2  # of the target, without its experts and its output head
    expert_bytes: float = 2  # of the target's experts
    other_bytes: float = 2  # of the drafter, the output head, and a number in the cache
    drafts_whole_blocks: bool = True  # as vLLM's V2 runner; V1 drafts the 1 + K slots that it needs
    overlaps: bool = False
    bandwidth_share: float = BANDWIDTH_SHARE
    operations_share: float = PREFILL_SHARE

    def bare_seconds(self, requests: int) -> float:
        """A step without a drafter."""
        return self.verify_seconds(requests, 0)

    def verify_seconds(self, requests: int, k: int) -> float:
        """The target's pass over 1 + k tokens of each request."""
        target, tokens = self.target, requests * (1 + k)
        cache = requests * self.context * target.kv_values_per_token
        read = self._target_bytes(tokens) + cache * self.other_bytes
        scores = 2 * target.num_layers * target.num_heads * target.head_dim * self.context
        return self._seconds(read, 2.0 * tokens * (target.active_parameters + scores))

    def draft_seconds(self, requests: int, k: int) -> float:
        """The drafter's pass: the context of new tokens, one block, and scores of its drafts."""
        shape = shape_for(self.target)
        weights = shape.parameters(self.draft_layers, self.taps)
        context_weights = self.taps * shape.hidden_size**2
        cache = requests * self.context * shape.kv_bytes_per_token(self.draft_layers, 1)
        slots = self.block_size if self.drafts_whole_blocks else 1 + k
        block = slots * (weights - context_weights) + (slots - 1) * self._head
        attention = 2 * slots * self.draft_layers * shape.num_heads * shape.head_dim * self.context
        operations = 2.0 * requests * (block + attention + (1 + k) * context_weights)
        return self._seconds(self.other_bytes * (weights + self._head + cache), operations)

    def step_seconds(self, requests: int, k: int) -> float:
        """A step that verifies k drafts of every request and drafts again."""
        return self.verify_seconds(requests, k) + self.draft_seconds(requests, k)

    def break_even(self, requests: int, k: int) -> float:
        """The acceptance length at which nothing is gained or lost."""
        return self.step_seconds(requests, k) / self.bare_seconds(requests)

    def speed_up(self, requests: int, k: int, tokens_per_step: float) -> float:
        return tokens_per_step / self.break_even(requests, k)

    def best(self, requests: int, probability: float, ladder: Iterable[int]) -> tuple[int, float]:
        """The K above 0 with the highest speed-up, and that speed-up; below 1 it is a loss."""
        found = {
            k: self.speed_up(requests, k, acceptance_length(probability, k)) for k in ladder if k
        }
        k = max(found, key=lambda each: found[each])
        return k, found[k]

    @property
    def _head(self) -> int:
        """Weights of the output head, which target and drafter share."""
        return self.target.vocab_size * self.target.hidden_size

    def _target_bytes(self, tokens: int) -> float:
        """Of the weights that a pass over so many tokens reads."""
        target, experts = self.target, self.target.experts
        read = (target.active_parameters - self._head) * self.weight_bytes
        if experts is not None:
            expert = 3 * target.hidden_size * experts.width
            layers = target.num_layers - experts.dense_layers
            # Each token chooses its experts; if evenly, so many differ in a step of all tokens.
            share = 1 - (1 - experts.active / experts.count) ** tokens
            read -= layers * experts.active * expert * self.weight_bytes
            read += layers * experts.count * share * expert * self.expert_bytes
        return read + self._head * self.other_bytes

    def _seconds(self, read: float, operations: float) -> float:
        reading = read / (self.device.bandwidth * self.bandwidth_share)
        computing = operations / (self.device.operations * self.operations_share)
        return max(reading, computing) if self.overlaps else reading + computing

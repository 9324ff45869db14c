"""Weights to compute with and weights to train: the same, or rounded copies of finer ones.

In bfloat16 the drafter computes as it will be served, but the small changes of single steps would
be lost in its rounding. So the optimiser moves float32 masters, and the drafter gets them rounded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer

from leadout.evaluate.acceptance import Validation
from leadout.evaluate.blocks import Blocks, batch, drafted_slots, draw_anchors, make_blocks
from leadout.evaluate.hidden_states import Indexed, StateSource
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.target_weights import Borrowed
from leadout.files import replacing
from leadout.train.config import TrainConfig
from leadout.train.objective import Objective, Scores, Slots, loss_of_slots
from leadout.train.progress import Listener, Log, StepRecord, ValidationRecord


class TrainedWeights:
    """The float32 weights of a drafter, by name, and their gradients."""

    def __init__(self, drafter: nn.Module, precision: torch.dtype) -> None:
        self._module = drafter
        self._rounded = precision != torch.float32
        drafter.float()
        self.masters: dict[str, nn.Parameter] = dict(drafter.named_parameters())
        if self._rounded:
            self.masters = {n: nn.Parameter(p.detach().clone()) for n, p in self.masters.items()}
            drafter.to(precision)

    def clear_gradients(self) -> None:
        """Zeros, not nothing: a rank without blocks still takes part in the sum over ranks."""
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)

    def collect_gradients(self) -> None:
        """Take over what the last backward pass left at the drafter's own parameters."""
        if not self._rounded:
            return
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                gradient = self.masters[name].grad
                assert gradient is not None
                gradient += parameter.grad
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the drafter the masters as they are now."""
        if self._rounded:
            for name, parameter in self._module.named_parameters():
                parameter.copy_(self.masters[name])

    def named(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.publish()


# How weights move: Muon or AdamW, warm-up, then a cosine down to zero.

ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95


def make_optimizers(weights: Mapping[str, nn.Parameter], config: TrainConfig) -> list[Optimizer]:
    """Matrices and vectors apart: norms have no weight decay, and Muon takes matrices only."""
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() != 2]
    if config.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS)]
    muon = Muon(
        matrices,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate serves both
    )
    adam = AdamW(vectors, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    return [muon, adam]


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """For step 0..steps-1."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def sum_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of all ranks; the loss's fixed denominator makes the sum exact."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    return nn.utils.clip_grad_norm_(list(parameters), largest)


# The gradient of one training step: sequences in passes of bounded size, summed over blocks.

RANDOM_CANDIDATES = 1024  # rare tokens, others at every pass, so that they are not forgotten


class StepResult(NamedTuple):
    """Sums over the blocks of a step (of this rank)."""

    loss: float
    blocks: int
    hits: Tensor  # [B-1]: leading slots that stood, a proxy of acceptance by position


class Gradient:
    """Computes gradients of the drafter's weights; knows nothing of optimisers and ranks."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        weights: TrainedWeights,
        borrowed: Borrowed,
        source: StateSource,
        config: TrainConfig,
        frequent: Tensor | None,
    ) -> None:
        self._forward = forward
        self._weights = weights
        self._borrowed = borrowed
        self._source = source
        self._config = config
        self._frequent = frequent  # [candidates] token ids, or None: score against all
        self._device = borrowed.embedding.device
        self._objective = Objective(
            config.distillation, config.position_weights, config.gamma, config.dpace_alpha
        )

    def accumulate(self, sequences: Sequence[Indexed], step: int, denominator: float) -> StepResult:
        """Add the gradients of these sequences' share of a step to the parameters' own."""
        slots = self._config.block_size - 1
        total, blocks, hits = 0.0, 0, torch.zeros(slots)
        for part in passes(sequences, self._config):
            loss, leading = self._one_pass(part, step, denominator)
            total += loss
            blocks += len(leading)
            hits += leading.float().sum(0).cpu()
        return StepResult(total, blocks, hits)

    def _one_pass(
        self, part: Sequence[Indexed], step: int, denominator: float
    ) -> tuple[float, Tensor]:
        config = self._config
        tokens, blocks = self._blocks(part, step)
        observed = self._source.observe(part)
        states = observed.states.to(self._device)
        if config.compile:  # one shape for every pass: compiling takes minutes
            states = F.pad(states, (0, 0, 0, config.max_length - states.shape[1]))
        drafted = drafted_slots(
            self._forward,
            states,
            observed.final.to(self._device),
            tokens,
            blocks,
        )
        scores, labels = self._scores(drafted.labels, step)
        teacher = drafted.teacher if config.distillation > 0 else None
        result = loss_of_slots(
            drafted.hidden,
            Slots(labels, drafted.counted, teacher),
            scores,
            self._objective,
            denominator,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        self._weights.collect_gradients()
        return result.loss.item(), result.hits.long().cumprod(-1)

    def _blocks(self, part: Sequence[Indexed], step: int) -> tuple[Tensor, Blocks]:
        config = self._config
        sequences = [sequence for _, sequence in part]
        tokens, _, supervised = batch(sequences)
        anchors = [
            draw_anchors(s.prompt_length, len(s), config.anchors, config.seed, step, s.name)
            for s in sequences
        ]
        most = config.anchors if config.compile else max(len(chosen) for chosen in anchors)
        return tokens, make_blocks(anchors, tokens, supervised, config.block_size, most)

    def _scores(self, labels: Tensor, step: int) -> tuple[Scores, Tensor]:
        """The head over all tokens, or over the candidates and this pass's labels."""
        head = self._borrowed.head
        if self._frequent is None:
            return Scores(head), labels
        generator = torch.Generator().manual_seed(step)
        rare = torch.randint(len(head), (RANDOM_CANDIDATES,), generator=generator)
        wanted = torch.cat([self._frequent, rare.to(head.device), labels.flatten()])
        rows = torch.unique(wanted)  # ascending
        return Scores(head[rows]), torch.searchsorted(rows, labels)


def passes(sequences: Sequence[Indexed], config: TrainConfig) -> Iterator[list[Indexed]]:
    """Sequences of like length together, in passes of like size that the memory allows."""
    if not sequences:
        return
    by_length = sorted(sequences, key=lambda item: (len(item[1]), item[1].name))
    longest = config.max_length if config.compile else len(by_length[-1][1])
    per_row = longest + config.anchors * config.block_size
    most = max(1, config.micro_tokens // per_row)
    count = -(-len(by_length) // most)
    for number in range(count):
        first, end = (len(by_length) * edge // count for edge in (number, number + 1))
        yield by_length[first:end]


# A training run on the disk: one file that a kill cannot tear, from which the run goes on.
#
# Anchors, order and learning rate follow from the step, so weights, optimiser state and a few
# numbers
# are all there is to keep. Tensors only: nothing is pickled.

STATE = "state.safetensors"
BEST = "best.safetensors"
_NUMBERS = "run"


class RunNumbers(BaseModel):
    """Where a run stands, besides its tensors."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # steps done
    seconds: float = 0.0  # spent in training, validation included
    best_acceptance: float = 0.0
    best_step: int = 0
    validations_without_gain: int = 0
    finished: bool = False


def save_state(
    folder: Path, weights: TrainedWeights, optimizers: Sequence[Optimizer], numbers: RunNumbers
) -> None:
    tensors = {f"weights.{name}": tensor for name, tensor in weights.named().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                tensors[f"optimizer.{number}.{index}.{key}"] = torch.as_tensor(value)
    _save(folder / STATE, tensors, {_NUMBERS: numbers.model_dump_json()})


def load_state(
    folder: Path, weights: TrainedWeights, optimizers: Sequence[Optimizer]
) -> RunNumbers | None:
    """Put a saved run's tensors in place; None where there is none to continue."""
    path = folder / STATE
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as opened:
        numbers = RunNumbers.model_validate_json(opened.metadata()[_NUMBERS])
    tensors = load_file(path)
    weights.load(_below(tensors, "weights."))
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below(tensors, f"optimizer.{number}.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return numbers


def save_best(folder: Path, weights: TrainedWeights) -> None:
    _save(folder / BEST, weights.named(), {})


def load_best(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / BEST)


def remove_leftovers(folder: Path) -> None:
    """What a kill left of files it was writing; only for the one who writes them."""
    for path in folder.glob(".*.safetensors.*.partial"):
        path.unlink()


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=metadata)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


# The training loop: steps, validations, checkpoints; continues where it was cut off.


class Loop:
    """One run. `fetch` gives training sequences by number; `validate` judges the drafter."""

    def __init__(
        self,
        folder: Path,
        weights: TrainedWeights,
        gradient: Gradient,
        config: TrainConfig,
        ranks: Ranks,
        train: Sequence[int],
        fetch: Callable[[int], Indexed],
        validate: Callable[[], Validation],
        listen: Listener,
    ) -> None:
        self._folder = folder
        self._weights = weights
        self._gradient = gradient
        self._config = config
        self._ranks = ranks
        self._train = train
        self._fetch = fetch
        self._validate = validate
        self._listen = listen
        self._optimizers = make_optimizers(weights.masters, config)
        self.steps = total_steps(len(train), config)

    def run(self) -> RunNumbers:
        """Train to the end, or until nothing is gained any more."""
        numbers = load_state(self._folder, self._weights, self._optimizers) or RunNumbers()
        log = Log(self._folder, numbers.step) if self._ranks.leads else None
        listeners: list[Listener] = [log, self._listen] if log else []
        before = numbers.seconds
        started = time.monotonic()
        while not numbers.finished:
            record = self._step(numbers.step, lambda: before + time.monotonic() - started)
            numbers.step += 1
            for listener in listeners:
                listener(record)
            last = numbers.step == self.steps
            if last or numbers.step % self._config.validate_every == 0:
                self._judge(numbers, listeners, lambda: before + time.monotonic() - started)
            numbers.finished = self._ranks.agree(last or self._is_out_of_patience(numbers))
            numbers.seconds = before + time.monotonic() - started
            if self._ranks.leads and (
                numbers.finished or numbers.step % self._config.save_every == 0
            ):
                save_state(self._folder, self._weights, self._optimizers, numbers)
        self._ranks.wait()
        return numbers

    def _step(self, step: int, seconds: Callable[[], float]) -> StepRecord:
        began = time.monotonic()
        self._weights.clear_gradients()
        batch = sequences_of_step(self._train, step, self._config)
        own = [self._fetch(index) for index in batch[self._ranks.rank :: self._ranks.count]]
        denominator = float(self._config.batch_sequences * self._config.anchors)
        result = self._gradient.accumulate(own, step, denominator)
        if self._ranks.count > 1:
            sum_over_ranks(self._weights.masters.values())
        norm = clip_gradients(self._weights.masters.values(), self._config.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"step {step + 1}: found a gradient norm of {norm.item()}, wanted a finite one; "
                "lower --learning-rate, or check the target's weights"
            )
        rate = learning_rate_at(step, self.steps, self._config)
        set_learning_rate(self._optimizers, rate)
        for optimizer in self._optimizers:
            optimizer.step()
        self._weights.publish()
        local = torch.tensor([result.loss, result.blocks, result.hits.sum().item()])
        loss, blocks, hits = self._ranks.add(local).tolist()
        return StepRecord(
            step=step + 1,
            seconds=seconds(),
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            blocks_per_second=blocks / (time.monotonic() - began),
            drafts_hit=1 + hits / max(blocks, 1),
        )

    def _judge(
        self, numbers: RunNumbers, listeners: Sequence[Listener], seconds: Callable[[], float]
    ) -> None:
        validation = self._validate()
        reached = validation.overall.acceptance_length
        if reached > numbers.best_acceptance:
            numbers.best_acceptance, numbers.best_step = reached, numbers.step
            numbers.validations_without_gain = 0
            if self._ranks.leads:
                save_best(self._folder, self._weights)
        else:
            numbers.validations_without_gain += 1
        record = ValidationRecord(step=numbers.step, seconds=seconds(), validation=validation)
        for listener in listeners:
            listener(record)

    def _is_out_of_patience(self, numbers: RunNumbers) -> bool:
        patience = self._config.patience
        return patience is not None and numbers.validations_without_gain >= patience


def total_steps(sequences: int, config: TrainConfig) -> int:
    return max(1, round(config.epochs * sequences / config.batch_sequences))


def sequences_of_step(train: Sequence[int], step: int, config: TrainConfig) -> list[int]:
    """The samples of a step: passes over the data, each in a new order, cut into batches."""
    size = config.batch_sequences
    chosen: list[int] = []
    place = step * size
    while len(chosen) < size:
        epoch, offset = divmod(place, len(train))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(train), generator=generator)
        part = order[offset : offset + size - len(chosen)].tolist()
        chosen += [train[i] for i in part]
        place += len(part)
    return chosen

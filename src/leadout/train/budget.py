"""A budget of minutes or tokens as settings: layers, anchors, batch and steps of a run.

The steps are fixed before training starts, so that the learning rate reaches zero exactly at the
end of the budget and a continued run is the same run. Minutes become steps by timing a few of them.

    anchors   as many as cost about as much as the rest of a sequence: its states and its context
    batch     as many sequences as make a usual number of blocks per step
    layers    the target's default; fewer if the budget does not train so many
    steps     what the budget allows

Settings that the user gave are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leadout.files import MissingFileError, read_model, write_text
from leadout.pairing import TargetSizes
from leadout.train.config import TrainConfig, TrainError
from leadout.train.costs import StatesSource, Work
from leadout.train.gradient import blocks_per_sequence
from leadout.train.loop import total_steps
from leadout.train.plan import Timing, answer_positions
from leadout.train.progress import ValidationRecord
from leadout.train.run import Corpus

BUDGET = "budget.json"
VALIDATIONS = 8  # during a run ...
VALIDATION_SHARE = 0.1  # ... but fewer if they took more than this share of the time

MIN_ANCHORS, MAX_ANCHORS = 16, 512
BLOCKS_PER_STEP = 4096
MIN_BATCH, MAX_BATCH = 8, 64
MIN_STEPS = 100  # with fewer, the batch is made smaller
# A rule of thumb: with fewer blocks than this for each layer, a shallower drafter is trained.
BLOCKS_PER_LAYER = 50_000
# Validations needed to fit a curve, and the factor in blocks that they must span.
MIN_POINTS, MIN_SPAN = 4, 2.0

Probe = Callable[[TrainConfig], Timing]


class Budget(BaseModel):
    """A budget and what was chosen for it; kept beside the run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    minutes: float | None
    tokens: int | None
    seconds_per_step: float | None  # as timed before the start; None for a budget of tokens
    layers: int
    anchors: int
    batch_sequences: int
    steps: int
    epochs: float
    visits: float  # blocks per position of the training answers

    def text(self) -> str:
        given = f"{self.minutes:g} minutes" if self.minutes else f"{self.tokens:,} answer tokens"
        timed = "" if self.seconds_per_step is None else f" of {self.seconds_per_step:.2f} s"
        return (
            f"{given} allow {self.steps:,} steps{timed}: {self.layers} layers, "
            f"{self.batch_sequences} sequences per step with about {self.anchors} blocks each; "
            f"{self.epochs:.1f} passes over the data, {self.visits:.1f} blocks for each position "
            "of the answers"
        )

    def write(self, folder: Path) -> None:
        write_text(folder / BUDGET, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Budget | None:
        try:
            return read_model(folder / BUDGET, cls)
        except MissingFileError:
            return None


def has_budget(config: TrainConfig) -> bool:
    return config.minutes is not None or config.tokens is not None


def require_no_epochs(config: TrainConfig) -> None:
    """A new run has one measure of its length."""
    if has_budget(config) and config.epochs is not None:
        flag = "minutes" if config.minutes is not None else "tokens"
        raise TrainError(
            f"--epochs {config.epochs:g} and --{flag} {getattr(config, flag):g} both set the "
            "number of steps; give one of them."
        )


def without_repeated_budget(config: TrainConfig, folder: Path) -> TrainConfig:
    """The settings of a continued run: a budget may be repeated, but not changed."""
    if not has_budget(config):
        return config
    before = Budget.read(folder)
    for name in ("minutes", "tokens"):
        now = getattr(config, name)
        then = None if before is None else getattr(before, name)
        if now is not None and now != then:
            started = "another budget" if then is None else f"--{name} {then:g}"
            raise TrainError(
                f"--{name} {now:g} differs from the run in {folder.parent}, which was started "
                f"with {started}. A continued run keeps its steps: omit the flag, or start "
                "another run."
            )
    return config.model_copy(update={"minutes": None, "tokens": None})


def fit_to_budget(
    config: TrainConfig,
    given: frozenset[str],
    sizes: TargetSizes,
    corpus: Corpus,
    source: StatesSource,
    ranks: int,
    probe: Probe,
) -> tuple[TrainConfig, Budget]:
    """Complete settings for the budget in `config`, without it, and a record of the choice.

    `config` is complete but for what is chosen here, `given` names what the user set, and `probe`
    times steps with some settings.
    """
    work = _work_of(config, sizes, corpus)
    changes: dict[str, int] = {}
    if not given & {"anchors", "anchors_per_token"}:
        positions = answer_positions(corpus) / len(corpus.split.train)
        changes["anchors"] = choose_anchors(work, source, positions)
    chosen = config.model_copy(update=changes)
    if "batch_sequences" not in given:
        batch = choose_batch(round(_blocks(chosen, corpus)), ranks)
        chosen = chosen.model_copy(update={"batch_sequences": batch})
    timing = probe(chosen) if config.minutes is not None else None
    fitted = _with_fewer_layers(chosen, given, work, source, corpus, timing)
    fitted = _with_smaller_batch(fitted, given, corpus, timing, chosen, ranks)
    if timing is not None and fitted != chosen:
        timing = probe(fitted)
    steps = _steps(fitted, given, corpus, timing)
    validations = VALIDATIONS
    if timing is not None and config.minutes is not None:
        validations = validations_for_seconds(60 * config.minutes, timing, corpus)
    final = with_steps(fitted, corpus, steps, validations)
    if "validate_every" in given:
        final = final.model_copy(update={"validate_every": config.validate_every})
    blocks = steps * final.batch_sequences * _blocks(final, corpus)
    assert final.layers is not None
    budget = Budget(
        minutes=config.minutes,
        tokens=config.tokens,
        seconds_per_step=None if timing is None else timing.seconds_per_step,
        layers=final.layers,
        anchors=round(_blocks(final, corpus)),
        batch_sequences=final.batch_sequences,
        steps=steps,
        epochs=final.passes,
        visits=blocks / answer_positions(corpus),
    )
    return final.model_copy(update={"minutes": None, "tokens": None}), budget


def choose_anchors(work: Work, source: StatesSource, positions: float) -> int:
    """As many as cost as much as the rest of a sequence, at most half of its answer's positions.

    `positions` is the mean number of positions in an answer. A power of two.
    """
    rest = work.context_operations
    if source != "disk":  # also where servers compute the states: they are to be kept busy
        rest += work.target_operations
    balanced = rest / work.operations_per_block
    bounded = min(max(balanced, MIN_ANCHORS), MAX_ANCHORS, max(1.0, positions / 2))
    return int(2 ** math.floor(math.log2(bounded)))


def choose_batch(anchors: int, ranks: int) -> int:
    """Sequences per step, a multiple of the ranks."""
    wanted = min(max(BLOCKS_PER_STEP // anchors, MIN_BATCH), MAX_BATCH)
    return max(1, math.ceil(wanted / ranks)) * ranks


def _with_fewer_layers(
    config: TrainConfig,
    given: frozenset[str],
    work: Work,
    source: StatesSource,
    corpus: Corpus,
    timing: Timing | None,
) -> TrainConfig:
    """The most layers, up to those of the config, that the budget has enough blocks for."""
    assert config.layers is not None
    if "layers" in given or config.initial != "random":  # a trained drafter has its layers
        return config
    blocks = _blocks(config, corpus)
    work = dataclasses.replace(work, anchors=round(blocks))
    whole = work.operations(source)
    for layers in range(config.layers, 1, -1):
        tried = config.model_copy(update={"layers": layers})
        share = dataclasses.replace(work, layers=layers).operations(source) / whole
        steps = _steps(tried, given, corpus, _scaled(timing, share))
        if steps * config.batch_sequences * blocks >= layers * BLOCKS_PER_LAYER:
            return tried
    return config.model_copy(update={"layers": 1})


def _with_smaller_batch(
    config: TrainConfig,
    given: frozenset[str],
    corpus: Corpus,
    timing: Timing | None,
    timed: TrainConfig,
    ranks: int,
) -> TrainConfig:
    """Half the sequences per step, and again, until there are enough steps."""
    if "batch_sequences" in given:
        return config
    while True:
        share = config.batch_sequences / timed.batch_sequences
        half = math.ceil(config.batch_sequences / 2 / ranks) * ranks
        enough = _steps(config, given, corpus, _scaled(timing, share)) >= MIN_STEPS
        if enough or half < MIN_BATCH or half == config.batch_sequences:
            return config
        config = config.model_copy(update={"batch_sequences": half})


def _blocks(config: TrainConfig, corpus: Corpus) -> float:
    """The mean number of blocks in a sequence."""
    return blocks_per_sequence([corpus.answers[i] for i in corpus.split.train], config)


def _scaled(timing: Timing | None, share: float) -> Timing | None:
    if timing is None:
        return None
    return dataclasses.replace(timing, seconds_per_step=timing.seconds_per_step * share)


def _steps(
    config: TrainConfig, given: frozenset[str], corpus: Corpus, timing: Timing | None
) -> int:
    if timing is None:
        assert config.tokens is not None
        return steps_for_tokens(config.tokens, config, corpus)
    assert config.minutes is not None
    every = config.validate_every if "validate_every" in given else None
    return steps_for_seconds(60 * config.minutes, timing, config, corpus, every)


def _work_of(config: TrainConfig, sizes: TargetSizes, corpus: Corpus) -> Work:
    assert config.layers is not None
    assert config.target_layer_ids is not None
    return Work.of(
        sizes,
        layers=config.layers,
        taps=len(config.target_layer_ids),
        block_size=config.block_size,
        anchors=config.anchors,
        length=sum(corpus.lengths) / len(corpus.lengths),
        mlp_width=config.mlp_width,
        candidates=config.candidates,
    )


def with_steps(settings: TrainConfig, corpus: Corpus, steps: int, validations: int) -> TrainConfig:
    """Settings for exactly `steps` steps, over which the learning rate decays to zero."""
    epochs = steps * settings.batch_sequences / len(corpus.split.train)
    every = max(1, math.ceil(steps / validations))
    changed = settings.model_copy(update={"epochs": epochs, "validate_every": every})
    assert total_steps(len(corpus.split.train), changed) == steps
    return changed


def steps_for_tokens(tokens: int, settings: TrainConfig, corpus: Corpus) -> int:
    """The number of steps that train on `tokens` answer tokens."""
    train = corpus.split.train
    answer_tokens = sum(corpus.answers[index] for index in train)
    return max(1, round(tokens * len(train) / answer_tokens / settings.batch_sequences))


def steps_for_seconds(
    seconds: float,
    timing: Timing,
    settings: TrainConfig,
    corpus: Corpus,
    validate_every: int | None = None,
) -> int:
    """The number of steps that fit, with their hidden states and validations.

    The validations are those of `validations_for_seconds`, or one every `validate_every` steps.
    """
    validating, per_step = _seconds_per_validation(timing, corpus), timing.seconds_per_step
    if validate_every is None:
        seconds -= (1 + validations_for_seconds(seconds, timing, corpus)) * validating
    else:
        seconds -= validating  # after the last step
        per_step += validating / validate_every
    train = corpus.split.train
    states = timing.seconds_per_token * sum(corpus.lengths[i] for i in set(train))
    per_pass = per_step * len(train) / settings.batch_sequences
    if settings.states != "disk":  # each step computes its states, and was timed with them
        passes = seconds / per_pass
    else:  # the first pass computes them
        passes = min(seconds / (per_pass + states), 1.0)
        passes += max(0.0, seconds - per_pass - states) / per_pass
    return max(1, int(passes * len(train) / settings.batch_sequences))


def validations_for_seconds(seconds: float, timing: Timing, corpus: Corpus) -> int:
    each = _seconds_per_validation(timing, corpus)
    if each <= 0:  # faster than the clock shows
        return VALIDATIONS
    return max(1, min(VALIDATIONS, int(VALIDATION_SHARE * seconds / each) - 1))


def _seconds_per_validation(timing: Timing, corpus: Corpus) -> float:
    return len(corpus.split.validation) * timing.seconds_per_validated


class Outlook(BaseModel):
    """What more time or more data would bring, as far as a run's own curve supports it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: float
    visits: float  # blocks per position of the training answers
    per_doubling: float | None  # acceptance length gained when the blocks double; None: not known
    overfits: bool  # held-out acceptance fell after its best, while the training loss fell

    def text(self) -> str:
        seen = (
            f"trained on {self.visits:.1f} blocks for each position of the answers, in "
            f"{self.epochs:.1f} passes over the data"
        )
        if self.overfits:
            return (
                f"{seen}. Held-out acceptance fell again at the end: more time on this data will "
                "not help, more data may."
            )
        if self.per_doubling is None:
            return f"{seen}. What more time or more data would bring is not known from this run."
        gain = (
            f"{seen}. By the curve of this run, twice the blocks would bring about "
            f"{self.per_doubling:+.2f} tokens of acceptance length"
        )
        if self.visits < 1:
            return f"{gain}; the data is not used up, so more time is enough."
        return f"{gain}; whether they should come from more time or more data is not known."


def outlook(
    validations: Sequence[ValidationRecord],
    losses: Sequence[float],
    epochs: float,
    blocks_per_step: float,
    positions: int,
) -> Outlook:
    """From the validations of a run, the losses of its steps, and the epochs that it made.

    The slope of acceptance over the logarithm of the blocks, by least squares over the last two
    thirds of the curve. It is given only where it is larger than twice its standard error.
    """
    points = [
        (math.log2(each.step * blocks_per_step), each.validation.overall.acceptance_length)
        for each in validations
        if each.step > 0
    ]
    steps = validations[-1].step if validations else 0
    return Outlook(
        epochs=epochs,
        visits=steps * blocks_per_step / positions,
        per_doubling=_slope(points),
        overfits=_overfits([length for _, length in points], losses),
    )


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """With a significant slope over enough points that span enough; else None."""
    late = points[len(points) // 3 :]  # the beginning of a curve is steeper
    if len(late) < MIN_POINTS or 2 ** (late[-1][0] - late[0][0]) < MIN_SPAN:
        return None
    count = len(late)
    mean_x, mean_y = (sum(point[axis] for point in late) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in late)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in late) / spread
    residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in late)
    error = math.sqrt(residual / (count - 2) / spread)
    return slope if slope > 2 * error else None


def _overfits(lengths: Sequence[float], losses: Sequence[float]) -> bool:
    """Whether the last two validations are below the best, while the loss still fell."""
    if len(lengths) < MIN_POINTS or len(losses) < MIN_POINTS:
        return False
    best = max(range(len(lengths)), key=lambda index: lengths[index])
    quarter = max(1, len(losses) // 4)
    still_learning = (
        sum(losses[-quarter:]) / quarter < sum(losses[-2 * quarter : -quarter]) / quarter
    )
    return best < len(lengths) - 2 and still_learning

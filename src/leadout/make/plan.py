"""What `leadout make` will do for a budget: sizes of data and training, and times of all stages.

Before anything ran, speeds are estimated from the size of the target and a matrix product timed on
this machine. After the first stage, which measures the target in vLLM, they are measured ones.
Times of stages are estimates in both cases; only the time of training is kept, as `leadout train
--minutes` keeps it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from leadout.check.run import MAX_TOKENS
from leadout.control.tuned_file import Tuned
from leadout.data.settings import DataSettings
from leadout.engine.calibration import RoundRequest
from leadout.engine.offline import SESSION_CONCURRENCY
from leadout.engine.server_turns import weight_bytes
from leadout.evaluate.hidden_states import compute_dtype
from leadout.evaluate.prompts import LONG_PROMPTS, prompts_or_default
from leadout.make.expected import expected_lengths
from leadout.make.settings import MakeError, MakeSettings
from leadout.pairing import TargetSizes
from leadout.pairing.devices import PREFILL_SHARE
from leadout.pairing.target import spread_layer_ids
from leadout.train.budget import choose_anchors
from leadout.train.config import TrainConfig
from leadout.train.costs import BFLOAT16, FLOAT32, TRAINING_SHARE, Work
from leadout.train.export import SERVED_PROMPTS, SERVED_TOKENS
from leadout.train.init import default_layers
from leadout.tune.plan import (
    SHORT_TOKENS,
    START_SECONDS,
    TOKENS,
    Clock,
    ProductTimes,
    draft_counts,
    make_rounds,
    measuring_seconds,
    product_seconds,
    short_rounds,
)

StageName = Literal["costs", "data", "train", "check", "tune"]
STAGES: tuple[StageName, ...] = ("costs", "data", "train", "check", "tune")

# Of the time that measurements leave; the rest is for training.
DATA_SHARE = 0.35
PASSES = 3.0  # over the data, with a budget of tokens
# Assumed before there is data; answers in that of the drafter in drafters/ have 199 tokens.
ANSWER_TOKENS, PROMPT_TOKENS = 200, 60
MIN_PROMPTS = 48
MIN_TRAINING_SECONDS = 60.0
QUICK_TEXTS = 4  # of each prompt set of the check
CHECK_PASSES = 5  # over the texts of a check, with and without the drafter
PREFILL_TOKENS = 512  # of a pass whose speed counts as that of long passes
CONCURRENCY: int = DataSettings.model_fields["concurrency"].default


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Speed(_Record):
    """Of the target on this machine."""

    measured: bool
    answer_tokens_per_second: float  # of all requests that `leadout data` has in flight
    session_tokens_per_second: float  # of the requests that a check has in flight
    operations_per_second: float  # of long passes, in the type in which training computes

    @property
    def source(self) -> str:
        return "measured" if self.measured else "estimated from the size of the target"


class PlannedStage(_Record):
    name: StageName
    what: str
    minutes: float


class MakePlan(_Record):
    speed: Speed
    layers: int
    block_size: int
    parameters: int  # of the drafter
    sources: list[str]  # of prompts
    limit: int | None  # prompts of each source; None: as many as it names
    samples: int  # answers, at most
    answer_tokens: int  # of all answers, about
    train_minutes: float | None
    train_tokens: int | None
    blocks: int  # to be trained on, about
    low: float  # expected acceptance length
    high: float
    stages: list[PlannedStage]

    @property
    def minutes(self) -> float:
        return sum(stage.minutes for stage in self.stages)

    def text(self) -> str:
        lines = [
            f"{stage.name:<8} about {_minutes(stage.minutes):>8}   {stage.what}"
            for stage in self.stages
        ]
        return "\n".join(
            [
                *lines,
                f"in all   about {_minutes(self.minutes):>8}   on an idle machine; speeds are "
                f"{self.speed.source}",
                f"expect   an acceptance length of {self.low:.2f} to {self.high:.2f}, a guess from "
                "the training of another, small model; whether that pays is measured first",
            ]
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """The target, and the shape of the drafter that is planned for it."""

    folder: Path
    sizes: TargetSizes
    config: TrainConfig

    @property
    def layers(self) -> int:
        """At most: with little time `leadout train` takes fewer."""
        return self.config.layers or default_layers(self.sizes)

    @property
    def taps(self) -> Sequence[int]:
        return self.config.target_layer_ids or spread_layer_ids(self.sizes.num_layers)

    @property
    def target_bytes(self) -> int:
        return weight_bytes(self.folder)

    def work(self, length: float) -> Work:
        """Costs of training on texts of this length, with as many anchors as training chooses."""
        work = Work.of(
            self.sizes,
            layers=self.layers,
            taps=len(self.taps),
            block_size=self.config.block_size,
            anchors=self.config.anchors,
            length=length,
            mlp_width=self.config.mlp_width,
            candidates=self.config.candidates,
        )
        if "anchors" not in self.config.model_fields_set:
            anchors = choose_anchors(work, "disk", length - PROMPT_TOKENS)
            work = dataclasses.replace(work, anchors=anchors)
        return work


def training_gain(dtype: str, clock: Clock = product_seconds) -> float:
    """How many times faster training computes than vLLM serves in this type.

    Processors without instructions for bfloat16 emulate it in vLLM; training computes in float32.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "float32" or compute_dtype(torch.bfloat16, device) == torch.bfloat16:
        return 1.0
    emulated, exact = (clock(PREFILL_TOKENS, each) for each in ("bfloat16", "float32"))
    return max(1.0, emulated / exact)


def estimated_speed(
    subject: Subject, times: ProductTimes, gain: float = 1.0, devices: int = 1
) -> Speed:
    """From the size of the target; `gain` is that of training.

    An engine divides its passes among `devices`; training computes on one.
    """

    def rate(requests: int) -> float:
        return devices * requests / times.forward_seconds(subject.target_bytes, requests)

    return Speed(
        measured=False,
        answer_tokens_per_second=rate(CONCURRENCY),
        session_tokens_per_second=rate(SESSION_CONCURRENCY),
        operations_per_second=gain
        * (2 * subject.sizes.active_parameters * PREFILL_TOKENS)
        / times.forward_seconds(subject.target_bytes, PREFILL_TOKENS),
    )


def measured_times(subject: Subject, costs: Tuned, products: ProductTimes) -> ProductTimes:
    """From steps of a server without a drafter; a further token never takes less than in products.

    Steps of few requests, which wait for the weights, may show no cost of a further token at all.
    """
    law, largest = costs.costs(), max(costs.verify)
    one, many = law.bare_seconds(1), law.bare_seconds(largest)
    found = ProductTimes.of_passes(max(subject.target_bytes, 1), one, many, largest)
    share = subject.sizes.active_parameters / subject.sizes.parameters  # of a mixture's weights
    per_token = max(found.per_token, min(share, 1.0) * products.per_token)
    return dataclasses.replace(found, per_token=per_token)


def measured_speed(subject: Subject, costs: Tuned, times: ProductTimes, gain: float = 1.0) -> Speed:
    """From the same steps, and beyond the measured ones from their times."""
    law, largest = costs.costs(), max(costs.verify)
    passes = partial(times.forward_seconds, subject.target_bytes)

    def rate(requests: int) -> float:
        if requests <= largest:
            return requests / law.bare_seconds(requests)
        return requests / (law.bare_seconds(largest) + passes(requests) - passes(largest))

    # Few short prompts at a time say little about a long pass.
    is_measured = largest * PROMPT_TOKENS >= PREFILL_TOKENS
    prefill = costs.prefill_bare.seconds if is_measured else passes
    operations = 2 * subject.sizes.active_parameters * PREFILL_TOKENS
    return Speed(
        measured=True,
        answer_tokens_per_second=rate(CONCURRENCY),
        session_tokens_per_second=rate(SESSION_CONCURRENCY),
        operations_per_second=gain * operations / max(prefill(PREFILL_TOKENS), 1e-6),
    )


def make_plan(
    settings: MakeSettings,
    subject: Subject,
    speed: Speed,
    times: ProductTimes,
    spent: float | None = None,
) -> MakePlan:
    """The sizes that the budget allows, and the times of all stages.

    `spent` are the seconds that the first stage took, once it is complete. A budget that is too
    small is refused before that, and exceeded afterwards.
    """
    planner = _Planner(settings, subject, speed, times)
    return planner.plan(spent)


class _Planner:
    def __init__(
        self, settings: MakeSettings, subject: Subject, speed: Speed, times: ProductTimes
    ) -> None:
        self._settings, self._subject, self._speed, self._times = settings, subject, speed, times
        self._answer = min(ANSWER_TOKENS, settings.max_new_tokens or ANSWER_TOKENS)
        self._length = PROMPT_TOKENS + self._answer
        self._work = subject.work(self._length)
        # The target writes the prompts of self:N as well.
        self._per_sample = self._length / speed.answer_tokens_per_second
        self._proof = (
            START_SECONDS + SERVED_PROMPTS * SERVED_TOKENS / speed.session_tokens_per_second
        )

    def plan(self, spent: float | None) -> MakePlan:
        settings = self._settings
        costs, check, tune = self._measuring(short=True), self._checking(), self._tuning()
        if settings.tokens is not None:
            trained: float = settings.tokens
            samples = max(MIN_PROMPTS, math.ceil(trained / PASSES / self._answer))
            blocks = trained / self._answer * self._work.anchors
            training = self._states(samples) + blocks / self._blocks_per_second
        else:
            assert settings.seconds is not None
            fixed = check + tune + self._proof + START_SECONDS
            first = costs if spent is None else spent
            least = MIN_TRAINING_SECONDS / (1 - DATA_SHARE)
            rest = settings.seconds - first - fixed
            if rest < least and spent is None:
                self._refuse(settings.seconds, first + fixed, least)
            rest = max(rest, least)
            training = rest * (1 - DATA_SHARE)
            samples = max(MIN_PROMPTS, int(rest * DATA_SHARE / self._per_sample))
            blocks = max(0.0, training - self._states(samples)) * self._blocks_per_second
        sources = list(settings.prompts) or [f"self:{samples}"]
        low, high = expected_lengths(blocks)
        data = START_SECONDS + samples * self._per_sample
        minutes = None if settings.tokens is not None else round(training / 60, 1)
        return MakePlan(
            speed=self._speed,
            layers=self._subject.layers,
            block_size=self._subject.config.block_size,
            parameters=self._work.parameters,
            sources=sources,
            limit=math.ceil(samples / len(sources)) if settings.prompts else None,
            samples=samples,
            answer_tokens=samples * self._answer,
            train_minutes=minutes,
            train_tokens=settings.tokens,
            blocks=round(blocks),
            low=low,
            high=high,
            stages=self._stages(costs, data, training, check, tune, samples, blocks),
        )

    def _stages(
        self,
        costs: float,
        data: float,
        training: float,
        check: float,
        tune: float,
        samples: int,
        blocks: float,
    ) -> list[PlannedStage]:
        shape = f"{self._subject.layers} layers, {self._work.parameters / 1e6:,.1f} million weights"
        what: dict[StageName, tuple[str, float]] = {
            "costs": (
                f"measure what drafting costs, with an untrained drafter ({shape})",
                costs,
            ),
            "data": (
                f"the target answers up to {samples:,} prompts: about "
                f"{samples * self._answer:,} tokens",
                data,
            ),
            "train": (
                f"train on about {blocks:,.0f} blocks, then serve held-out prompts in vLLM",
                training + self._proof,
            ),
            "check": (f"check the pair on {self._texts} texts", check),
            "tune": (
                f"measure draft lengths for up to {self._settings.max_batch} concurrent requests",
                tune,
            ),
        }
        return [
            PlannedStage(name=name, what=text, minutes=seconds / 60)
            for name, (text, seconds) in what.items()
        ]

    @property
    def _blocks_per_second(self) -> float:
        rate = self._speed.operations_per_second * TRAINING_SHARE / PREFILL_SHARE
        return self._work.anchors * rate / self._work.operations("disk")

    def _states(self, samples: int) -> float:
        """Seconds for the target's hidden states of all samples, once."""
        return samples * self._work.target_operations / self._speed.operations_per_second

    @property
    def _texts(self) -> int:
        """Of the check."""
        whole = prompts_or_default(())
        if not self._settings.quick:
            return len(whole) + LONG_PROMPTS
        return QUICK_TEXTS * (len({each.source for each in whole}) + 1)

    def _checking(self) -> float:
        tokens = CHECK_PASSES * self._texts * MAX_TOKENS
        return 2 * START_SECONDS + tokens / self._speed.session_tokens_per_second

    def _tuning(self) -> float:
        return self._measuring(short=self._settings.quick)

    def _measuring(self, *, short: bool) -> float:
        """Of `leadout tune`."""
        drafts = draft_counts(self._subject.config.block_size - 1, has_graphs=False)
        prompts = len(prompts_or_default(()))
        rounds: list[RoundRequest] = make_rounds(self._settings.max_batch, drafts, prompts)
        per_weight = FLOAT32 if self._settings.dtype == "float32" else BFLOAT16
        return measuring_seconds(
            self._times,
            self._subject.target_bytes,
            self._work.parameters * per_weight,
            short_rounds(rounds) if short else rounds,
            [PROMPT_TOKENS] * prompts,
            SHORT_TOKENS if short else TOKENS,
        )

    def _refuse(self, seconds: float, fixed: float, least: float) -> None:
        needed = math.ceil((fixed + least) / 360) / 10  # hours
        raise MakeError(
            f"--hours {seconds / 3600:g} is too little: measurements and starts of vLLM take about "
            f"{_minutes(fixed / 60)} on this machine, which leaves no time for text and training. "
            f"Give at least --hours {needed:g}, or fewer measurements with --quick or a smaller "
            "--max-batch."
        )


def _minutes(minutes: float) -> str:
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"

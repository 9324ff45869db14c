"""Sampled continuations with speculation are distributed as those without: 10,000, nightly 20,000.

For each pair of neighbouring tokens of the continuations the counts of both arms are compared with
a two-sample chi-square test. FALSE_ALARM is the chance, over the choice of seeds, that a case
fails although both distributions are the same: the tests of one case share it (Bonferroni). The
gate has teeth: with the same settings it must reject verifiers that are slightly wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leadout.dflash import generate as loop
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter
from leadout.dflash.generate import Completion, NothingProposer, decode
from leadout.dflash.propose import BlockProposer, Proposer
from leadout.dflash.target import Target
from leadout.dflash.verify import Sampling, Verdict, verify_sampled
from support.statistics import equality_p_value

ROWS = 5_000
LENGTH = 6
VOCAB = 6
FALSE_ALARM = 1e-4

SETTINGS = {
    "temperature 1": Sampling(1.0),
    "temperature 0.7, top-p 0.9": Sampling(0.7, top_p=0.9),
    "temperature 1.3, top-k 5": Sampling(1.3, top_k=5),
}


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.25,
        **sizes,
    )
    return Target(LlamaForCausalLM(config).eval(), layer_ids=(0, 2))


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    torch.manual_seed(2)
    drafter = Drafter(
        DrafterConfig(
            hidden_size=16,
            intermediate_size=32,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            layers=(LayerAttention(),),
            rope=Rope(theta=10_000.0),
            max_positions=64,
            target_layer_ids=(0, 2),
            vocab_size=VOCAB,
            mask_token_id=VOCAB - 1,
            block_size=4,
        )
    )
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter


@pytest.fixture(scope="module")
def count(nightly: bool) -> int:
    return 20_000 if nightly else 10_000


def continuations(
    target: Target,
    make_proposer: Callable[[torch.Generator], Proposer],
    sampling: Sampling,
    seed: int,
    count: int,
) -> list[Completion]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Completion] = []
    while len(found) < count:
        proposer = make_proposer(generator)
        found += decode(
            target,
            proposer,
            [[1, 2, 3]] * ROWS,
            max_new_tokens=LENGTH,
            draft_tokens=0 if isinstance(proposer, NothingProposer) else 3,
            sampling=sampling,
            stop_tokens=(),
            generator=generator,
        )
    return found


def smallest_p_value(first: list[Completion], second: list[Completion]) -> float:
    """The smallest of the tests' p-values, times their number."""
    p_values = [
        equality_p_value(
            [tuple(completion.tokens[i : i + 2]) for completion in first],
            [tuple(completion.tokens[i : i + 2]) for completion in second],
        )
        for i in range(LENGTH - 1)
    ]
    return min(p_values) * len(p_values)


@pytest.fixture(scope="module")
def plain(target: Target, count: int) -> dict[str, list[Completion]]:
    return {
        name: continuations(target, lambda _: NothingProposer(), sampling, seed=11, count=count)
        for name, sampling in SETTINGS.items()
    }


def speculate(
    target: Target, drafter: Drafter, sampling: Sampling, sample_drafts: bool, count: int
) -> list[Completion]:
    drawn = sampling if sample_drafts else None
    return continuations(
        target,
        lambda g: BlockProposer(drafter, target, ROWS, drawn, g),
        sampling,
        seed=22,
        count=count,
    )


GREEDY, DRAWN = (False, "greedy drafts"), (True, "drawn drafts")


def pairs(first: Sequence[Any], *in_ci: tuple[bool, str]) -> list[Any]:
    """Each with greedy and with drawn drafts, of which one at every change and both nightly."""
    return [
        pytest.param(
            each,
            drafts[0],
            id=f"{getattr(each, '__name__', each)}-{drafts[1]}",
            marks=() if drafts == chosen else pytest.mark.nightly,
        )
        for each, chosen in zip(first, in_ci, strict=True)
        for drafts in (GREEDY, DRAWN)
    ]


@pytest.mark.parametrize(("setting", "sample_drafts"), pairs(list(SETTINGS), GREEDY, DRAWN, GREEDY))
def test_speculation_keeps_the_distribution(
    target: Target,
    drafter: Drafter,
    plain: dict[str, list[Completion]],
    setting: str,
    sample_drafts: bool,
    count: int,
) -> None:
    speculated = speculate(target, drafter, SETTINGS[setting], sample_drafts, count)
    accepted = [count for completion in speculated for count in completion.accepted]
    # The test is only meaningful if some drafts are accepted and some rejected.
    assert 0.2 < sum(accepted) / len(accepted) < 2.5
    assert smallest_p_value(plain[setting], speculated) > FALSE_ALARM


def keeps_too_many(
    drafts: Tensor, p: Tensor, q: Tensor | None, generator: torch.Generator
) -> Verdict:
    """Accepts one in twenty of the drafts that should be rejected."""
    verdict = verify_sampled(drafts, p, q, generator)
    kind = torch.rand(len(drafts), generator=generator) < 0.05
    spared = kind & (verdict.accepted < drafts.shape[1])
    return Verdict(verdict.accepted + spared.long(), verdict.next_token)


def forgets_the_residual(
    drafts: Tensor, p: Tensor, q: Tensor | None, generator: torch.Generator
) -> Verdict:
    """After a rejection draws from the target again instead of from what q left over."""
    verdict = verify_sampled(drafts, p, q, generator)
    rows = torch.arange(len(drafts))
    again = torch.multinomial(p[rows, verdict.accepted], 1, generator=generator)[:, 0]
    return Verdict(verdict.accepted, again)


@pytest.mark.parametrize(
    ("biased", "sample_drafts"), pairs([keeps_too_many, forgets_the_residual], GREEDY, DRAWN)
)
def test_the_gate_fires_on_a_biased_verifier(
    target: Target,
    drafter: Drafter,
    plain: dict[str, list[Completion]],
    biased: Callable[..., Verdict],
    sample_drafts: bool,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "verify_sampled", biased)
    speculated = speculate(target, drafter, SETTINGS["temperature 1"], sample_drafts, count)
    assert smallest_p_value(plain["temperature 1"], speculated) < FALSE_ALARM


def test_the_gate_stays_silent_between_two_plain_runs(
    target: Target, plain: dict[str, list[Completion]], count: int
) -> None:
    for name, sampling in SETTINGS.items():
        again = continuations(target, lambda _: NothingProposer(), sampling, seed=33, count=count)
        assert smallest_p_value(plain[name], again) > FALSE_ALARM

"""The reference loop writes what the target alone would write, and counts its steps right."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from leadout.dflash import generate as loop
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter
from leadout.dflash.generate import (
    GREEDY,
    Completion,
    acceptance_by_position,
    acceptance_length,
    decode,
    generate,
)
from leadout.dflash.propose import Proposal
from leadout.dflash.target import Target
from leadout.dflash.verify import Sampling, Verdict, verify_greedy

VOCAB, HIDDEN, BLOCK = 80, 32, 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    # A window far shorter than the text: rows that end at different places must not shift it.
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=6)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=6)),
}
PROMPTS = [[5, 9, 2, 44, 7, 7, 31], [3], [60, 61, 62], [8] * 12, [1, 2, 3, 4, 5], [70, 2]]


def build_target(family: str) -> Target:
    torch.manual_seed(3)
    return Target(FAMILIES[family]().eval(), layer_ids=(0, 2, 3))


LONGEST = 40


@cache
def plain_texts(family: str) -> tuple[Target, list[list[int]]]:
    """A target, and what it writes alone after each of the prompts."""
    target = build_target(family)
    return target, [slow_greedy(target, prompt, LONGEST) for prompt in PROMPTS]


def build_drafter(**changes: object) -> Drafter:
    torch.manual_seed(4)
    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "layers": (LayerAttention(), LayerAttention(window=4, causal=True)),
        "rope": Rope(theta=10_000.0),
        "max_positions": 256,
        "target_layer_ids": (0, 2, 3),
        "vocab_size": VOCAB,
        "mask_token_id": VOCAB - 1,
        "block_size": BLOCK,
    }
    return Drafter(DrafterConfig(**(fields | changes)))  # type: ignore[arg-type]


@torch.no_grad()
def slow_greedy(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    """Plain decoding without any cache or batch: the whole text again for each token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(target.step(torch.tensor([text]), keep_logits=1).logits[0, -1].argmax()))
    return text[len(prompt) :]


class Oracle:
    """Knows the continuation of each prompt, so all its drafts are accepted."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = torch.tensor(texts)
        self.done = torch.zeros(len(texts), dtype=torch.int64) - 1

    def commit(self, states: Tensor, counts: Tensor) -> None:
        # The first commit is the prompt; after it the anchor is token 0 of the continuation.
        first = self.done < 0
        self.done = torch.where(first, torch.zeros_like(counts), self.done + counts)

    def propose(self, anchors: Tensor, count: int) -> Proposal:
        rows = torch.arange(len(anchors))
        assert torch.equal(self.texts[rows, self.done], anchors)
        places = self.done[:, None] + 1 + torch.arange(count)
        return Proposal(self.texts.gather(1, places), None)

    def keep_rows(self, index: Tensor) -> None:
        self.texts, self.done = self.texts[index], self.done[index]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_greedy_text_equals_plain_decoding(family: str, batch_size: int, nightly: bool) -> None:
    target, texts = plain_texts(family)
    prompts = PROMPTS[:2] if batch_size == 1 and not nightly else PROMPTS
    for drafter in (None, build_drafter()):
        completions = generate(target, drafter, prompts, max_new_tokens=24, batch_size=batch_size)
        expected = [text[:24] for text in texts[: len(prompts)]]
        assert [completion.tokens for completion in completions] == expected
        assert {completion.finish for completion in completions} == {"length"}


def test_the_equality_fails_with_a_verifier_that_lets_a_wrong_draft_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lenient(drafts: Tensor, target_logits: Tensor) -> Verdict:
        verdict = verify_greedy(drafts, target_logits)
        return Verdict((verdict.accepted + 1).clamp(max=drafts.shape[1]), verdict.next_token)

    monkeypatch.setattr(loop, "verify_greedy", lenient)
    target, texts = plain_texts("llama")
    (completion,) = generate(target, build_drafter(), PROMPTS[:1], max_new_tokens=24)
    assert completion.tokens != texts[0][:24]


def test_text_is_not_all_alike() -> None:
    # The equality above would prove little for a target that repeats one token.
    _, texts = plain_texts("llama")
    assert len(set(texts[0][:24])) > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_an_oracle_is_accepted_whole(family: str) -> None:
    target, texts = plain_texts(family)
    completions = decode(
        target,
        Oracle(texts),
        PROMPTS,
        max_new_tokens=24,
        draft_tokens=BLOCK - 1,
        sampling=GREEDY,
        stop_tokens=(),
        generator=torch.Generator(),
    )
    assert [completion.tokens for completion in completions] == [text[:24] for text in texts]
    assert acceptance_length(completions) == BLOCK
    assert acceptance_by_position(completions, BLOCK - 1) == [1.0] * (BLOCK - 1)
    # One token from the prefill, then BLOCK a step.
    assert [len(completion.accepted) for completion in completions] == [5] * len(PROMPTS)


class SometimesRight(Oracle):
    """Right in its first `right` drafts of each step, then wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], right: Sequence[int]) -> None:
        super().__init__(texts)
        self.right = torch.tensor(right)

    def propose(self, anchors: Tensor, count: int) -> Proposal:
        tokens = super().propose(anchors, count).tokens
        wrong = torch.arange(count) >= self.right[:, None]
        return Proposal(torch.where(wrong, (tokens + 1) % VOCAB, tokens), None)

    def keep_rows(self, index: Tensor) -> None:
        super().keep_rows(index)
        self.right = self.right[index]


def test_rows_of_one_batch_accept_and_end_on_their_own() -> None:
    target, texts = plain_texts("qwen3")
    right = [0, 1, 2, 3, 4, 2]
    stop = texts[4][7]  # ends row 4 early, and whichever other row writes it
    completions = decode(
        target,
        SometimesRight(texts, right),
        PROMPTS,
        max_new_tokens=20,
        draft_tokens=4,
        sampling=GREEDY,
        stop_tokens=[stop],
        generator=torch.Generator(),
    )
    for completion, text, accepted in zip(completions, texts, right, strict=True):
        if stop in text[:20]:
            assert completion.tokens == text[: text.index(stop) + 1]
            assert completion.finish == "stop"
        else:
            assert completion.tokens == text[:20]
            assert completion.finish == "length"
        assert set(completion.accepted) <= {accepted}
        assert completion.acceptance_length == 1 + accepted or not completion.accepted
    assert completions[4].finish == "stop"


def test_acceptance_counts_are_pooled_over_steps() -> None:
    completions = [Completion(accepted=[0, 2, 3]), Completion(accepted=[1])]
    assert acceptance_length(completions) == 1 + 6 / 4
    assert acceptance_by_position(completions, 3) == [3 / 4, 2 / 4, 1 / 4]
    assert acceptance_length([Completion()]) == 1.0


def test_reduced_vocabulary_drafts_stay_inside_it_and_text_is_unchanged() -> None:
    target, texts = plain_texts("llama")
    drafter = build_drafter(own_head=True, draft_vocab_size=10)
    assert drafter.d2t is not None
    chosen = torch.tensor([1, 4, 9, 16, 25, 36, 49, 64, 70, 79])
    drafter.d2t.copy_(chosen - torch.arange(10))
    expected = [text[:12] for text in texts]
    for sampling, sample_drafts in ((GREEDY, False), (Sampling(1e-4), True)):
        completions = generate(
            target,
            drafter,
            PROMPTS,
            max_new_tokens=12,
            sampling=sampling,
            sample_drafts=sample_drafts,
        )
        assert [completion.tokens for completion in completions] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 33}, "batch_size is 33; expected 1 to 32"),
        ({"draft_tokens": BLOCK}, f"draft_tokens is {BLOCK}; expected 1 to {BLOCK - 1}"),
        ({"max_new_tokens": 300}, "positions, the drafter has 256"),
        ({"sample_drafts": True}, "sample_drafts"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, int], message: str) -> None:
    settings = {"max_new_tokens": 4} | arguments
    with pytest.raises(ValueError, match=message):
        generate(build_target("llama"), build_drafter(), PROMPTS, **settings)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt is empty"):
        generate(build_target("llama"), None, [[1], []], max_new_tokens=4)

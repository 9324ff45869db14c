"""A model of any family, tapped: the right states, nothing more kept, nothing left behind."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    SiglipVisionConfig,
)

from leadout.dflash.target import Target, UnsupportedTargetError

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "sliding_window": 8,
}
IMAGE = SiglipVisionConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    image_size=4,
    patch_size=2,
)

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)),
    "gemma3 with images": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=Gemma3TextConfig(**SIZES),
            vision_config=IMAGE,
            image_token_index=49,
            boi_token_index=48,
            eoi_token_index=47,
        )
    ),
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = FAMILIES[request.param]().eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" in name:  # a fresh norm is the identity and would hide a missing one
                parameter.uniform_(0.5, 1.5)
    return built


@pytest.fixture
def qwen3() -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = FAMILIES["qwen3"]().eval()
    return built


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@torch.no_grad()
def test_states_are_the_layers_outputs_in_the_order_asked(model: nn.Module) -> None:
    target = Target(model, [2, 0, 3])
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 16, 50)
    step = target.step(IDS)
    reference = model(input_ids=IDS, output_hidden_states=True)
    torch.testing.assert_close(step.logits, reference.logits)

    third, first, last = step.states.split(16, dim=-1)
    assert torch.equal(third, reference.hidden_states[3])
    assert torch.equal(first, reference.hidden_states[1])
    final_norm = model.get_decoder().norm
    torch.testing.assert_close(final_norm(last), reference.hidden_states[4])
    assert not torch.allclose(last, reference.hidden_states[4], atol=1e-2), "already normed"


@torch.no_grad()
def test_steps_on_a_cache_equal_one_pass(model: nn.Module) -> None:
    target = Target(model, [1, 3])
    whole = target.step(IDS)
    past = DynamicCache(config=model.config)
    positions = torch.arange(7).expand(2, -1)
    first = target.step(IDS[:, :4], positions[:, :4], past, keep_logits=1)
    second = target.step(IDS[:, 4:], positions[:, 4:], past)
    assert past.get_seq_length() == 7
    torch.testing.assert_close(first.logits, whole.logits[:, 3:4])
    torch.testing.assert_close(second.logits, whole.logits[:, 4:])
    torch.testing.assert_close(torch.cat([first.states, second.states], 1), whole.states)


@torch.no_grad()
def test_states_alone_are_the_same_and_skip_the_head(model: nn.Module) -> None:
    target = Target(model, [0, 3])
    expected = target.step(IDS).states
    calls: list[object] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    found = target.states(IDS, torch.arange(7).expand(2, -1))
    handle.remove()
    torch.testing.assert_close(found, expected)
    assert not calls


@torch.no_grad()
def test_an_observation_ends_with_what_the_head_reads(model: nn.Module) -> None:
    target = Target(model, [2, 0])
    calls: list[object] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0  # padding on the right
    observed = target.observe(IDS, mask)
    handle.remove()
    assert not calls
    alone = target.step(IDS[1:, :5])
    torch.testing.assert_close(observed.states[1:, :5], alone.states)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    scores = target.head(observed.final[1:, :5])
    expected = torch.tanh(scores / cap) * cap if cap else scores
    torch.testing.assert_close(expected, alone.logits)


@torch.no_grad()
def test_embedding_is_raw_and_head_is_uncapped(model: nn.Module) -> None:
    target = Target(model, [0])
    assert target.embedding is model.get_input_embeddings().weight
    hidden = torch.randn(1, 3, 16) * 10
    assert torch.equal(target.head(hidden), hidden @ model.get_output_embeddings().weight.T)


def test_head_keeps_its_bias_and_takes_other_precisions(qwen3: nn.Module) -> None:
    qwen3.lm_head = nn.Linear(16, 50, bias=True)
    hidden = torch.randn(1, 3, 16)
    target = Target(qwen3, [0])
    assert torch.equal(target.head(hidden), qwen3.lm_head(hidden))
    assert target.head(hidden.bfloat16()).dtype == torch.float32


def test_model_is_left_as_it_was(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    target = Target(model, [0, 3])
    target.step(IDS)
    target.states(IDS)
    assert hook_count(model) == 0
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_hooks_go_away_when_the_model_fails(qwen3: nn.Module) -> None:
    target = Target(qwen3, [0, 3])
    with pytest.raises(IndexError):
        target.step(torch.tensor([[10_000]]))
    assert hook_count(qwen3) == 0


def test_only_the_chosen_layers_are_caught_and_the_others_freed(qwen3: nn.Module) -> None:
    target = Target(qwen3, [1, 3])
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive_at_the_end: list[bool] = []
    handles = [
        layer.register_forward_hook(lambda _m, _i, output: outputs.append(weakref.ref(output)))
        for layer in qwen3.model.layers
    ]
    handles.append(
        qwen3.lm_head.register_forward_hook(
            lambda *_: alive_at_the_end.extend(output() is not None for output in outputs)
        )
    )
    step = target.step(IDS)
    for handle in handles:
        handle.remove()
    assert alive_at_the_end == [False, True, False, True]
    assert step.states.shape == (2, 7, 32)
    assert all(output() is None for output in outputs), "kept after the step"


def test_states_carry_no_graph(qwen3: nn.Module) -> None:
    step = Target(qwen3, [0]).step(IDS)
    assert not step.states.requires_grad
    assert not step.states.is_inference(), "a trainer must be able to use them"


def test_logits_of_chosen_positions(qwen3: nn.Module) -> None:
    target = Target(qwen3, [0])
    whole = target.step(IDS)
    some = target.step(IDS, keep_logits=torch.tensor([2, 5]))
    torch.testing.assert_close(some.logits, whole.logits[:, [2, 5]])
    assert some.states.shape == whole.states.shape
    with pytest.raises(ValueError, match="keep_logits is 0"):
        target.step(IDS, keep_logits=0)


def test_padding_is_hidden_by_the_mask(qwen3: nn.Module) -> None:
    target = Target(qwen3, [1, 3])
    padded = IDS.clone()
    padded[1, :3] = 1
    positions = torch.arange(7).expand(2, -1)
    both = target.step(padded, positions, attention_mask=(padded != 1).long())
    alone = target.step(IDS[1:, 3:], positions[1:, 3:])
    torch.testing.assert_close(both.states[1:, 3:], alone.states)


@pytest.mark.parametrize("ids", [[], [4], [-1], [1, 1]])
def test_layers_the_target_does_not_have_are_refused(qwen3: nn.Module, ids: list[int]) -> None:
    with pytest.raises(UnsupportedTargetError, match=r"target_layer_ids is .* from 0 to 3"):
        Target(qwen3, ids)


def test_model_without_known_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10))
    with pytest.raises(UnsupportedTargetError, match="GPT2LMHeadModel cannot be a target"):
        Target(model, [0])


def test_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match=r"Qwen3Model\.get_output_embeddings"):
        Target(Qwen3Model(Qwen3Config(**SIZES)), [0])


def test_wrapped_decoder_is_found_without_get_decoder(qwen3: nn.Module) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.language_model = inner
            self.get_input_embeddings = inner.get_input_embeddings
            self.get_output_embeddings = inner.get_output_embeddings

        def forward(self, **inputs: Any) -> Any:
            return self.language_model(**inputs)

    wrapped = Target(Wrapper(qwen3), [0, 3])
    assert torch.equal(wrapped.step(IDS).states, Target(qwen3, [0, 3]).step(IDS).states)

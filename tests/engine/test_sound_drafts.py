"""On CPUs vLLM 0.32 samples wrongly where it verifies drafts; with our scheduler it does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.checkpoints import write_checkpoint
from leadout.engine.scheduler import CpuSamplingWorkaround
from leadout.engine.settings import SCHEDULER
from support.drafters import TINY_DRAFTER, random_drafter
from support.models import tiny_llama

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
PROMPTS = [[7, 8, 9, 10, 11] * 4, [40, 41, 42, 43] * 5, [3, 5, 7], list(range(60, 90))]


def test_vllm_does_not_spread_temperatures_over_the_tokens_of_a_step() -> None:
    """When this fails, vLLM has fixed it: `CpuSamplingWorkaround` can go for that version."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    temperatures = torch.full((6,), -5.0)
    _expand_kernel_impl(temperatures, torch.tensor([0.7, 1.0, 0.3]), ends, 0, 1)
    assert torch.equal(temperatures, torch.full((6,), -5.0))  # untouched
    whole_numbers = torch.zeros(6, dtype=torch.int64)
    _expand_kernel_impl(whole_numbers, torch.tensor([7, 8, 9]), ends, 0, 1)
    assert whole_numbers.tolist() == [7, 7, 8, 8, 8, 9]


def test_vllm_applies_top_k_to_steps_without_drafts() -> None:
    """When this fails, vLLM has fixed it: such requests need no `top_p` any more."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    nothing, none = torch.empty(0, 320), torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="max"):
        apply_top_k_top_p_pytorch(nothing, none, None, allow_cpu_sync=True)
    apply_top_k_top_p_pytorch(nothing, none, torch.empty(0), allow_cpu_sync=True)


@pytest.mark.parametrize("drafts", [[[], []], [[4], [5]]], ids=["without drafts", "with drafts"])
def test_vllm_cannot_gather_chosen_tokens_with_a_drafter(drafts: list[list[int]]) -> None:
    """When this fails, vLLM has fixed it: `LabelLogprobsWorkaround` can go for that version.

    If only steps with drafts fail, such requests need no log-probabilities of all tokens any more.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=2,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(2),
        presence_penalties=torch.zeros(2),
        repetition_penalties=torch.ones(2),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = RejectionSampler(Sampler())
    step = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    logits = torch.randn(2 + sum(map(len, drafts)), 320)
    assert sampler(step, None, logits, metadata).logprobs_tensors is not None
    metadata.logprob_token_ids = {0: [3, 4]}
    with pytest.raises(RuntimeError, match="shape mismatch"):
        sampler(step, None, logits, metadata)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    write_checkpoint(folder / "drafter", random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder / "target", folder / "drafter"


def answers(llm: Any, temperatures: list[float], top_k: int = 0) -> list[list[int]]:
    from vllm import SamplingParams

    asks = [
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            seed=number if temperature else None,
            max_tokens=24,
            ignore_eos=True,
            detokenize=False,
        )
        for number, temperature in enumerate(temperatures)
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], asks, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def chosen_logprobs(llm: Any, at_once: int) -> list[list[dict[int, float]]]:
    """Of chosen tokens, of the most likely ones and of none, with so many requests at once."""
    from vllm import SamplingParams

    usual = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    chosen = [0, 319, 7]
    asks = [
        SamplingParams(logprob_token_ids=chosen, **usual),
        SamplingParams(logprobs=2, **usual),
        SamplingParams(logprob_token_ids=chosen[:1], logprobs=1, **usual),
        SamplingParams(**usual),
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [
        output
        for first in range(0, len(prompts), at_once)
        for output in llm.generate(
            prompts[first : first + at_once], asks[first : first + at_once], use_tqdm=False
        )
    ]
    return [
        [
            {token: round(each.logprob, 3) for token, each in step.items()}
            for step in output.outputs[0].logprobs or []
        ]
        for output in outputs
    ]


def drafts_verified(llm: Any) -> int:
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_draft_tokens":
            return int(metric.value)
    return 0


def drafts_asked_for(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """K of every step from here on."""
    found: list[int] = []
    schedule = scheduler.schedule

    def listening(*arguments: Any, **settings: Any) -> Any:
        output = schedule(*arguments, **settings)
        if output.total_num_scheduled_tokens:
            found.append(output.num_spec_tokens_to_schedule)
        return output

    monkeypatch.setattr(scheduler, "schedule", listening)
    return found


def test_sampled_and_greedy_requests_side_by_side_say_what_bare_vllm_says(
    pair: tuple[Path, Path], run_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, greedy = [0.0, 0.9, 0.0, 0.7], [0.0] * 4
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True}
    # More than all requests need at once, so that seeds are kept: no prompt is computed in parts.
    sizes["max_num_batched_tokens"] = 4096
    with run_engine(pair[0], **sizes) as llm:
        bare = [answers(llm, mixed), answers(llm, greedy), answers(llm, mixed, top_k=3)]
        # Beside a request that has chosen tokens, bare vLLM gives others -inf.
        bare_logprobs = chosen_logprobs(llm, at_once=1)
    assert bare[2] != bare[0]
    speculation = {
        "method": "dflash",
        "model": str(pair[1]),
        "num_speculative_tokens": CONFIG.max_draft_tokens,
    }
    with run_engine(
        pair[0],
        speculative_config=speculation,
        scheduler_cls=SCHEDULER,
        disable_log_stats=False,
        **sizes,
    ) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, CpuSamplingWorkaround)
        asked = drafts_asked_for(scheduler, monkeypatch)
        assert answers(llm, mixed) == bare[0]
        assert answers(llm, mixed, top_k=3) == bare[2]
        assert drafts_verified(llm) == 0
        assert set(asked) == {0}
        assert answers(llm, greedy) == bare[1]
        assert (verified := drafts_verified(llm)) > 0
        assert set(asked) != {0}
        asked.clear()
        assert chosen_logprobs(llm, at_once=4) == bare_logprobs
        assert drafts_verified(llm) == verified
        assert set(asked) == {0}

"""vLLM's drafter module in this process, loaded as in a worker, without an engine around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leadout.engine import draft_model, staging
from leadout.engine.server import free_port


@contextmanager
def one_process_group(vllm_config: Any) -> Iterator[None]:
    """vLLM's process groups for a single worker."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(vllm_config):
        address = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def engine_config(target: Path, drafter: Path, draft_tokens: int, dtype: str = "float32") -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from leadout.engine.plugin import register

    register()
    arguments = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": draft_tokens,
        },
    )
    return arguments.create_engine_config()


def load_served_drafter(vllm_config: Any) -> Any:
    """The drafter of a config; its attention layers are unknown to any engine."""
    from vllm.model_executor.model_loader import get_model

    vllm_config.compilation_config.static_forward_context.clear()
    draft_config = vllm_config.speculative_config.draft_model_config
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's CPU runner does the same; there is no allocator whose cache could be emptied.
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        return get_model(vllm_config=vllm_config, model_config=draft_config)


def serve_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Stands in for a GPU: linear layers keep their weights, and the context projection is fused.

    Only what happens to weights; everything stays in host memory.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    not_cpu = SimpleNamespace(is_cpu=lambda: False)
    patch.setattr(draft_model, "current_platform", not_cpu)
    patch.setattr(staging, "current_platform", not_cpu)
    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", lambda *_: None)
    patch.setattr(
        UnquantizedLinearMethod,
        "apply",
        lambda _method, layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias),
    )


def pointers(drafter: Any) -> dict[str, int]:
    """The addresses of all tensors that serve."""
    return {name: each.data_ptr() for name, each in drafter.own_tensors().items()}


@torch.no_grad()
def responses(drafter: Any) -> list[torch.Tensor]:
    """What every projection and norm of the drafter answers to a fixed input, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    model, answers = drafter.model, []
    dtype = model.norm.weight.dtype

    def ask(layer: Any, size: int) -> None:
        states = torch.randn(3, size, generator=generator).to(dtype)
        answer = layer(states)
        answers.append(answer[0] if isinstance(answer, tuple) else answer)

    ask(model.fc, model.fc.input_size)
    for layer in model.layers:
        for part in (
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        ):
            ask(part, part.input_size)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            ask(norm, model.config.hidden_size)
    for norm in (model.hidden_norm, model.norm):
        ask(norm, model.config.hidden_size)
    states = torch.randn(3, model.config.hidden_size, generator=generator).to(dtype)
    sizes = (model._num_attn_layers, model._num_kv_heads, model._head_dim)
    keys, values = model._project_context_kv(states, 3, *sizes)
    answers += [keys, values, model._k_norm_weights.clone()]
    return answers

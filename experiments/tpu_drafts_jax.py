"""Drafts of tpu-inference's DFlash, for `tpu_drafts.py`, which runs this in another environment.

    python experiments/tpu_drafts_jax.py FOLDER...

Needs tpu-inference, jax and flax, not Leadout. Each FOLDER has `request.json` and
`inputs.safetensors`; this adds `outputs.safetensors` and `facts.json`. The model, its reader of
weights, its rotary embedding, its paged cache and its block of masks are the package's own. Its
attention kernel runs on TPUs only, so that one call is replaced by the kernel's reference
implementation, which the package has for its tests.
"""

# ruff: noqa: E402 (the environment is set, and torchax helped, before imports)

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", VLLM_PLUGINS="", TPU_ACCELERATOR_TYPE="")

import torch


def _let_torchax_import() -> None:
    """torchax 0.0.13 lists overloads for named dimensions, which torch 2.13 no longer has."""
    packet = torch._ops.OpOverloadPacket
    found = packet.__getattr__

    def __getattr__(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "dimname" in name.lower() or "names" in name:
                return (str(self), name)  # a key of its tables that no operation has
            raise

    packet.__getattr__ = __getattr__


_let_torchax_import()

import jax
import jax.numpy as jnp
import numpy as np
import tpu_inference.models.jax.dflash as dflash
from flax import nnx
from jax.sharding import Mesh
from safetensors.flax import load_file, save_file
from tpu_inference.kernels.ragged_paged_attention.v3.kernel import (
    get_kv_cache_shape,
    ref_ragged_paged_attention,
)
from tpu_inference.layers.common.attention_interface import sharded_ragged_paged_attention
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES_2D
from tpu_inference.spec_decode.jax.dflash import DFlashProposer
from vllm.engine.arg_utils import EngineArgs

NOT_REFUSED = "not refused"
PAGE = 16  # tokens in a page of the cache


def main() -> None:
    dflash.attention = _reference_attention
    for folder in sys.argv[1:]:
        _draft(Path(folder))


def _draft(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    inputs = load_file(folder / "inputs.safetensors")
    devices = np.array(jax.devices()[:1]).reshape((1, 1))
    outputs: dict[str, jax.Array] = {}
    mesh = Mesh(devices, MESH_AXIS_NAMES_2D)
    with mesh, jax.set_mesh(mesh):
        model = dflash.DFlashForCausalLM(_vllm_config(request), jax.random.key(0), mesh)
        model.load_weights(jax.random.key(0))
        attention = model.model.layers[0].self_attn
        facts = {
            "class": type(model).__name__,
            "rope_theta": float(attention.rope_theta),
            "rope_scaling": attention.rope_scaling,
            "kernel": _answer_of_kernel(model, mesh),
            "versions": {n: version(n) for n in ("tpu-inference", "jax", "flax", "transformers")},
        }
        for dtype in ("bfloat16", "float32"):
            run = _Run(model, mesh, request, inputs, jnp.dtype(dtype))
            drafts, logits = zip(*map(run.step, range(len(request["anchors"]))), strict=True)
            outputs[f"{dtype}.drafts"] = jnp.stack(drafts)  # [steps, rows, K]
            outputs[f"{dtype}.logits"] = jnp.stack(logits).astype(jnp.float32)
    save_file(outputs, folder / "outputs.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts, indent=2))


def _vllm_config(request: dict[str, Any]) -> Any:
    """What vLLM itself makes of the pair, so that both configs are read as a server reads them."""
    arguments = EngineArgs(
        model=request["target"],
        dtype="bfloat16",
        max_model_len=request["max_length"],
        hf_overrides=request["hf_overrides"],
        speculative_config={
            "method": "dflash",
            "model": request["drafter"],
            "num_speculative_tokens": request["draft_tokens"],
        },
    )
    config = arguments.create_engine_config()
    config.model_config.dtype = jnp.bfloat16  # as the TPU platform of vLLM replaces torch's
    return config


class _Run:
    """Rows of a batch with one paged cache each, advanced step by step."""

    def __init__(
        self, model: Any, mesh: Mesh, request: dict[str, Any], inputs: Any, dtype: Any
    ) -> None:
        self._request, self._mesh, self._dtype = request, mesh, dtype
        _set_weights(model, inputs, dtype)
        self._model = model
        self._rows = len(request["anchors"][0])
        self._states = [inputs[f"states.{row}"] for row in range(self._rows)]
        self._lengths = np.zeros(self._rows, dtype=np.int32)
        self._pages = -(-request["max_length"] // PAGE)
        attention = self._model.model.layers[0].self_attn
        shape = get_kv_cache_shape(
            self._rows * self._pages, PAGE, attention.num_kv_heads, attention.head_dim, dtype
        )
        self._caches = [jnp.zeros(shape, dtype) for _ in self._model.model.layers]
        # The proposer's own block of masks and its choice of slots, without its runner.
        self._proposer = object.__new__(DFlashProposer)
        self._proposer.mesh = mesh
        self._proposer.block_size = self._model.block_size
        self._proposer.num_speculative_tokens = request["draft_tokens"]
        self._proposer.compute_logits_fn = lambda _, hidden, __: self._model.compute_logits(hidden)

    def step(self, number: int) -> tuple[jax.Array, jax.Array]:
        """Commit the states of this step, then draft: [rows, K] and [rows, K, vocab]."""
        counts = np.array(self._request["counts"][number], dtype=np.int32)
        before, self._lengths = self._lengths, self._lengths + counts
        new = [
            states[start : start + count]
            for states, start, count in zip(self._states, before, counts, strict=True)
        ]
        positions = np.concatenate(
            [np.arange(s, s + c) for s, c in zip(before, counts, strict=True)]
        ).astype(np.int32)
        context = self._model.combine_hidden_states(jnp.concatenate(new).astype(self._dtype))
        block = self._model.block_size
        tokens, places = self._proposer._build_noise_block(
            jnp.array(self._lengths),
            jnp.array(self._request["anchors"][number], jnp.int32),
            self._model.mask_token_id,
            block,
        )
        metadata = AttentionMetadata(
            input_positions=places,
            block_tables=jnp.arange(self._rows * self._pages, dtype=jnp.int32),
            seq_lens=jnp.array(self._lengths),
            query_start_loc=jnp.arange(self._rows + 1, dtype=jnp.int32) * block,
            request_distribution=jnp.array([0, 0, self._rows], dtype=jnp.int32),
        )
        starts = jnp.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        self._caches, hidden, *_ = self._model(
            self._caches, tokens, (context, starts, jnp.array(positions)), metadata
        )
        drafts = self._proposer._get_draft_token_ids(None, hidden)
        count = self._request["draft_tokens"]
        slots = hidden.reshape(self._rows, block, -1)[:, 1 : 1 + count]
        logits = self._model.compute_logits(slots.reshape(self._rows * count, -1))
        return drafts, logits.reshape(self._rows, count, -1)


def _set_weights(model: Any, inputs: Any, dtype: Any) -> None:
    """Give the model the target's embedding and head, and all of its weights this type."""
    model.model.embed_tokens.embedding.value = inputs["embedding"]
    if hasattr(model.lm_head, "weight"):  # else it is the embedding
        model.lm_head.weight.value = inputs["head"].T
    for _, each in nnx.iter_graph(model):
        if isinstance(each, nnx.Param):
            each.value = each.value.astype(dtype)


def _reference_attention(
    kv_cache: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attention_metadata: AttentionMetadata,
    mesh: Mesh,
    head_dim_original: int,
    sm_scale: float,
    use_causal_mask: bool,
    update_kv_cache: bool,
) -> tuple[jax.Array, jax.Array]:
    """`attention` of tpu-inference, by the kernel's reference implementation."""
    assert update_kv_cache
    metadata = attention_metadata
    output, cache = ref_ragged_paged_attention(
        q,
        k,
        v,
        kv_cache,
        metadata.seq_lens,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.request_distribution,
        use_causal_mask=use_causal_mask,
        sm_scale=sm_scale,
    )
    return cache, output


def _answer_of_kernel(model: Any, mesh: Mesh) -> str:
    """How the real kernel refuses a block of this drafter, or NOT_REFUSED.

    Only the shapes are traced. What fails after the refusals, fails for want of a TPU.
    """
    layer = model.model.layers[0].self_attn
    shape = get_kv_cache_shape(4, PAGE, layer.num_kv_heads, layer.head_dim, jnp.bfloat16)
    token, number = model.block_size, jnp.int32
    arrays = (
        jax.ShapeDtypeStruct((token, layer.num_heads, layer.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((token, layer.num_kv_heads, layer.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((token, layer.num_kv_heads, layer.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), number),
        jax.ShapeDtypeStruct((4,), number),
        jax.ShapeDtypeStruct((2,), number),
        jax.ShapeDtypeStruct((3,), number),
    )

    def block(*each: jax.Array) -> Any:
        return sharded_ragged_paged_attention(
            mesh, *each, None, sm_scale=1.0, use_causal_mask=False
        )

    try:
        jax.eval_shape(block, *arrays)
    except NotImplementedError as refusal:
        return str(refusal)
    except Exception as missing:
        return f"{NOT_REFUSED} ({type(missing).__name__} without a TPU)"
    return NOT_REFUSED


if __name__ == "__main__":
    main()

"""Where a training run gets the target's hidden states from, if not from its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from leadout.engine.states_server import states_server
from leadout.evaluate.hidden_states import compute_dtype
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.reference import why_not_loaded
from leadout.evaluate.served_states import ServedStates, states_from
from leadout.train.config import TrainConfig, TrainError

# Of a GPU that the trainer shares with its server of states; vLLM would take almost all of it, of
# which a few texts at a time need little.
SERVER_MEMORY = 0.7


@contextmanager
def served_states(
    target: Path,
    layer_ids: Sequence[int],
    config: TrainConfig,
    longest: int,
    ranks: Ranks,
    vllm_flags: Sequence[str] = (),
) -> Iterator[ServedStates | None]:
    """States of running servers (--states-from), or of one that ends with the block.

    None if the run computes them itself, which it cannot do for some targets. `longest` is the
    length of the longest text in tokens; `vllm_flags` are those of a server that is started here.
    """
    urls = config.states_from
    precision: torch.dtype = getattr(torch, config.precision)
    reason = None
    if config.states != "served":
        computed_in = compute_dtype(precision, ranks.device)
        reason = why_not_loaded(target, computed_in, ranks.device, vllm_flags)
    if not urls and config.states != "served" and reason is None:
        yield None
        return
    if not urls and ranks.count > 1:
        why = "--states served" if reason is None else f"{target} cannot be loaded ({reason}), and"
        raise TrainError(
            f"{why} needs a server of hidden states, which is started for a single process only. "
            "Start servers with `leadout serve TARGET --states` and name them with --states-from."
        )
    with ExitStack() as opened:
        if not urls:
            server = states_server(
                target,
                layer_ids,
                longest=longest,
                dtype=config.precision,
                vllm_flags=vllm_flags,
                gpu_memory=SERVER_MEMORY,
            )
            urls = (opened.enter_context(server),)
        source = states_from(
            urls, target, layer_ids, longest=longest, dtype=precision, device=torch.device("cpu")
        )
        yield opened.enter_context(source)

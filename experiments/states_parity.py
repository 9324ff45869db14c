"""Hidden states of vLLM servers against transformers, and training through failing servers.

    python experiments/states_parity.py parity --out results/states/parity.json
    python experiments/states_parity.py kill --out results/states/kill.json

`parity`: the largest difference of states and final states for each kind of server, and the loss
curves of one training run from both sources. `kill`: the same run from two servers, of which one is
killed and the other is paused for a minute.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import ONE_THREAD, write_result

CHUNK = 64  # tokens of a prompt per step
MAX_LENGTH = 256
PAUSE_SECONDS = 60.0
FLAGS = [
    *("--enforce-eager", "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", str(CHUNK)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("parity", "kill"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from support.tiny_data import write_predictable_target

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = write_predictable_target(folder / "tiny")
        if arguments.part == "parity":
            parity(folder, tiny, arguments.out)
        else:
            kill(folder, tiny, arguments.out)


@contextmanager
def serving(target: Path, folder: Path, *flags: str, fp8: bool = False) -> Iterator[Any]:
    """A server of the states of the layers 1, 2 and 3, and of the last one."""
    from leadout.engine.serve_plan import make_plan
    from leadout.engine.server import Server
    from leadout.engine.settings import ServeSettings

    folder.mkdir(parents=True, exist_ok=True)
    settings = ServeSettings(
        target=str(target),
        states=True,
        layers=(1, 2, 3),
        states_folder=folder,
        states_backlog=0.05,
        states_fp8=fp8,
        vllm_flags=(*FLAGS, *flags),
    )
    plan = make_plan(settings)
    environment = ONE_THREAD | plan.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / "log"
    with Server(plan.command, log=log, environment=environment, startup_seconds=600) as server:
        yield server


def texts(vocabulary: int) -> list[Any]:
    """Shorter and longer than a chunk; the last one shares more than a cache block with another."""
    import torch

    from leadout.evaluate.blocks import TrainingSequence

    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(5, vocabulary, (n,), generator=generator) for n in (40, 97, 200)]
    drawn.append(torch.cat([drawn[2][:140], torch.tensor([77, 78, 79])]))
    return [
        (number, TrainingSequence(str(number), "drawn", tokens, 3))
        for number, tokens in enumerate(drawn)
    ]


def differences(server: Any, target: Path, dtype: str, vocabulary: int) -> dict[str, Any]:
    """The largest difference by text length, relative to the largest value, read twice."""
    import torch

    from leadout.dflash.target import Target
    from leadout.evaluate.hidden_states import ComputedStates, load_model
    from leadout.evaluate.served_states import states_from

    precision = getattr(torch, dtype)
    model = load_model(target, precision)
    layers = (1, 2, 3)
    reference = ComputedStates(lambda: Target(model, layers))
    found: dict[str, Any] = {}
    device = torch.device("cpu")
    with states_from(
        [server.url], target, layers, longest=200, dtype=precision, device=device
    ) as source:
        for when in ("first", "again"):  # the second time from the prefix cache
            before = cached_tokens(server)
            by_length = {}
            for item in texts(vocabulary):
                pair = zip(source.observe([item]), reference.observe([item]), strict=True)
                by_length[f"{len(item[1])} tokens"] = {
                    name: relative(mine, theirs)
                    for name, (mine, theirs) in zip(("states", "final"), pair, strict=True)
                }
            hits = cached_tokens(server) - before
            found[when] = {"cached_tokens": hits, "by_length": by_length}
    return found


def relative(mine: Any, theirs: Any) -> dict[str, float]:
    mine, theirs = mine.float(), theirs.float()
    return {
        "largest": float((mine - theirs).abs().max() / theirs.abs().max()),
        "norm": float((mine - theirs).norm() / theirs.norm()),
    }


def cached_tokens(server: Any) -> float:
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    name = "vllm:prefix_cache_hits_total"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def parity(folder: Path, tiny: Path, out: Path) -> None:
    from support.models import cached_smollm2

    cases: dict[str, Any] = {}
    smollm2 = cached_smollm2()
    plan: list[tuple[str, Path, str, int, tuple[str, ...], bool]] = [
        ("tiny, 1 rank", tiny, "float32", 250, (), False),
        ("tiny, 2 ranks", tiny, "float32", 250, ("--tensor-parallel-size", "2"), False),
        ("tiny, bfloat16", tiny, "bfloat16", 250, (), False),
        ("tiny, FP8 states", tiny, "float32", 250, (), True),
        ("SmolLM2, 1 rank", smollm2, "float32", 49_000, (), False),
    ]
    curves: dict[str, list[float]] = {}
    for name, target, dtype, vocabulary, flags, fp8 in plan:
        place = folder / name.replace(" ", "-").replace(",", "")
        with serving(target, place, "--dtype", dtype, *flags, fp8=fp8) as server:
            cases[name] = {
                "dtype": dtype,
                "chunk_tokens": CHUNK,
                **differences(server, target, dtype, vocabulary),
            }
            print(name, cases[name], flush=True)
            if name == "tiny, 1 rank":
                curves = {
                    "transformers": losses(folder, tiny, "computed", ()),
                    "served": losses(folder, tiny, "served", (server.url,)),
                }
            if fp8:
                curves["served in FP8"] = losses(folder, tiny, "fp8", (server.url,))
        # After every case: a run that is interrupted leaves those before it.
        result = {"cases": cases, "loss_curves": curves}
        write_result(out, result, target=smollm2, tiny_target=tiny)


def losses(
    folder: Path,
    target: Path,
    name: str,
    urls: Sequence[str],
    epochs: float = 2.0,
    on_step: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """The loss of every step of one training run, on data that is made at the first call."""
    from leadout.data.manifest import DataFolder
    from leadout.train.progress import StepRecord
    from leadout.train.run import Run, complete_settings, read_corpus
    from leadout.train.states_source import served_states
    from support.models import TINY_VOCAB
    from support.small_runs import ALONE, small_config
    from support.tiny_data import write_tiny_data

    data = folder / "data"
    if not data.exists():
        write_tiny_data(data, target)
    config = small_config(epochs=epochs, validate_every=99, states_from=tuple(urls))
    corpus = read_corpus(DataFolder(data), target, config, TINY_VOCAB)
    config = complete_settings(config, target, corpus, TINY_VOCAB)
    taps = config.target_layer_ids or ()
    found: list[float] = []

    def listen(record: Any) -> None:
        if isinstance(record, StepRecord):
            found.append(record.loss)
            on_step(len(found))

    with served_states(target, taps, config, max(corpus.lengths), ALONE) as states:
        Run(target, corpus, config, folder / name, ALONE, states=states).train(listen)
    return found


def kill(folder: Path, tiny: Path, out: Path) -> None:
    """One server is killed after some texts, the other is paused while it is the only one."""
    epochs = 6.0
    with ExitStack() as opened:
        servers = [
            opened.enter_context(serving(tiny, folder / f"server-{n}", "--dtype", "float32"))
            for n in range(2)
        ]
        urls = [server.url for server in servers]
        undisturbed = losses(folder, tiny, "undisturbed", urls, epochs)
        steps = len(undisturbed)
        events: list[dict[str, Any]] = []
        began = time.monotonic()

        def note(what: str) -> None:
            events.append({"seconds": round(time.monotonic() - began, 1), "event": what})

        def resume() -> None:
            time.sleep(PAUSE_SECONDS)
            servers[1].resume()
            note("the paused server goes on")

        resuming = threading.Thread(target=resume)

        def disturb(step: int) -> None:
            if step == steps // 4:
                for pid in servers[0].processes:
                    os.kill(pid, signal.SIGKILL)
                note(f"one of two servers killed after step {step}")
            if step == steps // 2:
                servers[1].pause()
                note(f"the other one paused after step {step}")
                resuming.start()

        disturbed = losses(folder, tiny, "disturbed", urls, epochs, disturb)
        note("training ended")
        resuming.join()
        seconds = time.monotonic() - began
    largest = max(abs(one - other) / one for one, other in zip(undisturbed, disturbed, strict=True))
    result = {
        "steps": len(disturbed),
        "pause_seconds": PAUSE_SECONDS,
        "seconds": seconds,
        "events": events,
        "largest_relative_difference_of_loss": largest,
        "loss": {"undisturbed": undisturbed, "disturbed": disturbed},
    }
    write_result(out, result, tiny_target=tiny)


if __name__ == "__main__":
    main()

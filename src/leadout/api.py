"""What `import leadout` offers: the commands as functions, reference decoding, and a server.

Settings are those of the command line with underscores: `leadout.check(t, d, static=True)` is
`leadout check T D --static`. Results are the pydantic models that `--json` prints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from leadout.bench.results import BenchResult
    from leadout.check.result import CheckResult
    from leadout.control.tuned_file import Tuned
    from leadout.dflash.drafter import Drafter
    from leadout.train.export import TrainReport


def load_drafter(name: str | Path, revision: str | None = None) -> Drafter:
    """A drafter of either format, as a torch module, from a folder or a hub name."""
    from leadout.checkpoints import load_drafter
    from leadout.models import local_folder

    return load_drafter(local_folder(str(name), revision))


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer, and the mean number of tokens per step of the target."""

    text: str
    tokens: list[int]
    acceptance_length: float


def generate(
    target: str | Path,
    drafter: Drafter | str | Path | None,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    draft_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Generated]:
    """Answer chat prompts with the reference implementation, in float32 on the CPU.

    It is the oracle that engines are compared with, and slow; use `Server` for speed.
    """
    import torch

    from leadout.data.chat import Chat
    from leadout.dflash import generate as reference
    from leadout.dflash.target import Target
    from leadout.dflash.verify import Sampling
    from leadout.evaluate.hidden_states import load_model
    from leadout.models import local_folder

    folder = local_folder(str(target))
    if isinstance(drafter, str | Path):
        drafter = load_drafter(drafter)
    chat = Chat(folder)
    layers = drafter.config.target_layer_ids if drafter is not None else (0,)
    completions = reference.generate(
        Target(load_model(folder, torch.float32), layers),
        drafter.float() if drafter is not None else None,
        [chat.prompt([prompt]) for prompt in prompts],
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        sampling=Sampling(temperature=temperature),
        stop_tokens=[] if chat.end_of_turn is None else [chat.end_of_turn],
        seed=seed,
    )
    return [
        Generated(chat.text(each.tokens), each.tokens, each.acceptance_length)
        for each in completions
    ]


def check(target: str | Path, drafter: str | Path, **settings: Any) -> CheckResult:
    """Whether a drafter fits a target, with the evidence; see `leadout check --help`."""
    from leadout.check.run import check
    from leadout.check.settings import CheckSettings

    given = {"target": str(target), "drafter": str(drafter), **settings}
    return check(CheckSettings.resolve(given))


def train(target: str | Path, data: str | Path, out: str | Path, **settings: Any) -> TrainReport:
    """Train a drafter into the folder `out`; see `leadout train --help`."""
    from leadout.train.command import train
    from leadout.train.config import TrainConfig

    report = train(str(target), Path(data), Path(out), TrainConfig.resolve(settings))
    assert report is not None, "one process is its own leading rank"
    return report


def tune(target: str | Path, drafter: str | Path, **settings: Any) -> Tuned:
    """Measure draft lengths by load; see `leadout tune --help`. Writes no file."""
    from leadout.console import Progress
    from leadout.tune.run import tune
    from leadout.tune.settings import TuneSettings

    given = {"target": str(target), "drafter": str(drafter), **settings}
    with Progress("tune") as progress:
        return tune(TuneSettings.resolve(given), progress)


def bench(target: str | Path, **settings: Any) -> BenchResult:
    """Measure arms against bare vLLM; see `leadout bench --help`."""
    from leadout.bench.run import bench
    from leadout.bench.settings import BenchSettings
    from leadout.console import Progress

    with Progress("bench") as progress:
        return bench(BenchSettings.resolve({"target": str(target), **settings}), progress)


class Server:
    """A vLLM server with a drafter, as `leadout serve` starts it, for the length of a `with` block.

    `url` is its address. `vllm_flags` go to vLLM as they are; other settings are those of
    `leadout serve`. Output goes to `log`, by default a file in a temporary folder.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        vllm_flags: Sequence[str] = (),
        log: Path | None = None,
        **settings: Any,
    ) -> None:
        self._settings = {
            "target": str(target),
            "draft": None if draft is None else str(draft),
            "vllm_flags": tuple(vllm_flags),
            **settings,
        }
        self.log = log or Path(tempfile.mkdtemp(prefix="leadout-")) / "server.log"
        self.url = ""

    def __enter__(self) -> Self:
        from leadout.engine import server
        from leadout.engine.serve_plan import make_plan
        from leadout.engine.settings import ServeSettings

        plan = make_plan(ServeSettings.resolve(self._settings))
        self._server = server.Server(plan.command, log=self.log, environment=plan.environment)
        self._server.__enter__()
        self.url = self._server.url
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

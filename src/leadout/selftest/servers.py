"""The servers of a self-test: what they serve, how each is started, what can be asked of one.

`python -m leadout.selftest.servers` plans them in a process of its own, because planning imports
vLLM, which logs to the terminal and may touch the accelerator.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.checkpoints.store import CONFIG
from leadout.engine.admin import KEY
from leadout.engine.child_process import EngineError, Message, Report, answer_requests, run_module
from leadout.engine.inspection import (
    INSPECTION,
    INSPECTION_AND_SWAP,
    DraftStep,
    WorkerFacts,
    read_steps,
    worker_facts,
)
from leadout.engine.plugin import SWITCH
from leadout.engine.server import POLL_SECONDS, Server, server_command
from leadout.engine.server_turns import (
    CPU_FLAGS,
    RunningServer,
    machine_environment,
    model_location,
)
from leadout.engine.settings import WORKER_EXTENSION, ServeSettings
from leadout.errors import LeadoutError
from leadout.files import write_text
from leadout.models import fingerprint, is_left_to_vllm, local_folder
from leadout.registry import Registry
from leadout.selftest.settings import SelftestSettings

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from leadout.engine.serve_plan import Plan

STOCK, EVERYTHING, REGISTRY, LIVE, CAPTURE = "stock", "everything", "registry", "live", "capture"
PARTS = (REGISTRY, LIVE, CAPTURE)
FIRST, CHANGED = 1, 2  # versions of the drafter: as it is, and with a final norm of the other sign
# vLLM logs statistics of CUDA graphs at these intervals, and the table only at this level.
LOG_SECONDS = 1.0
ANSWER_SECONDS = 600.0  # for one request, also while a large model is slow
_LOGGING = {"VLLM_LOG_STATS_INTERVAL": f"{LOG_SECONDS:g}", "VLLM_LOGGING_LEVEL": "INFO"}
_DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # for /collective_rpc
_GRAPH_METRICS = "--cudagraph-metrics"
_SPECULATION = "--speculative-config"


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of target and drafter."""

    target: Path | None  # None: only vLLM can fetch it
    drafter: Path

    @classmethod
    def of(cls, target: str, drafter: str, flags: Sequence[str] = ()) -> Pair:
        """`flags` are the user's, which may name the target's revision and the download folder."""
        revision, download_dir = model_location(flags)
        folder = None
        if not is_left_to_vllm(target):
            folder = local_folder(target, revision, download_dir)
        return cls(folder, local_folder(drafter, None, download_dir))

    @property
    def fingerprints(self) -> dict[str, str]:
        folders = {"target": self.target, "drafter": self.drafter}
        return {role: fingerprint(each) for role, each in folders.items() if each is not None}


def publish_versions(pair: Pair, folder: Path) -> Registry | None:
    """A registry with the drafter and a changed copy; None for one that cannot be swapped."""
    checkpoint = read_checkpoint(pair.drafter, as_served=True)
    if checkpoint.left_to_vllm or pair.target is None:
        return None
    registry = Registry(folder / "registry")
    target_fingerprint = fingerprint(pair.target)
    registry.publish(pair.drafter, target_fingerprint=target_fingerprint)
    changed = write_changed(checkpoint, folder / "changed")
    registry.publish(changed, target_fingerprint=target_fingerprint, parent=FIRST)
    registry.point_to(FIRST, "the drafter of the self-test")
    return registry


def write_changed(checkpoint: Checkpoint, folder: Path) -> Path:
    """A copy of a drafter whose best token is the worst, so that a swap cannot be missed.

    Files are copied and not written anew, since published drafters may lack fields that Leadout
    would require.
    """
    folder.mkdir()
    for path in checkpoint.path.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    norm = checkpoint.tensors.drafter["norm.weight"]
    tensors = load_file(norm.file)
    tensors[norm.name] = -tensors[norm.name]
    save_file(tensors, folder / norm.file.name, metadata={"format": "pt"})
    # Fingerprints contain only samples of the weights.
    config = json.loads((folder / CONFIG).read_text())
    write_text(folder / CONFIG, json.dumps({**config, "leadout_selftest": "changed"}, indent=2))
    return folder


class PlanRequest(Message):
    target: str
    drafter: str
    flags: tuple[str, ...]  # of the user
    on_cpu: bool
    registry: Path | None  # None: the drafter cannot be swapped
    capture: Path


class PlannedServer(Message):
    command: list[str]
    environment: dict[str, str]


class Plans(Message):
    servers: dict[str, PlannedServer]
    parts: list[str]  # of Leadout that these flags allow
    refused: dict[str, str]  # the others, and why
    resolved: WorkerFacts  # by vLLM without Leadout's parts
    max_requests: int  # in one step
    api_servers: int = 1  # of the server with everything


def make_plans(request: PlanRequest) -> Plans:
    """Plan all servers in a child process; a `LeadoutError` if the pair or a flag is wrong."""
    return run_module(__spec__.name, request, Plans)


def plan_here(request: PlanRequest, _report: Report) -> Plans:
    from leadout.engine.serve_plan import make_plan
    from leadout.engine.vllm_flags import parse, vllm_config_of, without_speculation

    parse(request.target, request.flags, SelftestSettings)  # names this command in its errors
    flags = [*(CPU_FLAGS if request.on_cpu else ()), *request.flags, _GRAPH_METRICS]

    def plan(*parts: str) -> Plan:
        has_registry = REGISTRY in parts
        return make_plan(
            ServeSettings(
                target=request.target,
                draft=None if has_registry else request.drafter,
                registry=str(request.registry) if has_registry else None,
                live=LIVE in parts,
                capture=capture_folder(request.capture, parts) if CAPTURE in parts else None,
                vllm_flags=tuple(flags),
            )
        )

    command = plan().command  # refuses a wrong pair or flag
    speculation = command[command.index(_SPECULATION) + 1]
    stock_flags = [*without_speculation(flags), _SPECULATION, speculation]
    config = vllm_config_of(request.target, stock_flags)
    servers = {
        STOCK: PlannedServer(
            command=server_command(request.target, stock_flags),
            environment=_environment({SWITCH: "0"}),
        )
    }
    refused: dict[str, str] = {}
    if request.registry is None:
        refused[REGISTRY] = "this drafter cannot be swapped: Leadout leaves parts of it to vLLM"
    for part in PARTS:
        if part in refused:
            continue
        try:
            servers[part] = _planned(plan(part), inspected=part == REGISTRY)
        except LeadoutError as problem:
            refused[part] = str(problem)
    parts = [part for part in PARTS if part not in refused]
    everything = plan(*parts)
    servers[EVERYTHING] = _planned(everything, inspected=True)
    own = everything.command[everything.command.index(request.target) + 1 :]
    return Plans(
        servers=servers,
        parts=parts,
        refused=refused,
        resolved=worker_facts(config, None),
        max_requests=config.scheduler_config.max_num_seqs,
        api_servers=_api_servers(parse(request.target, own)),
    )


def _api_servers(parsed: Any) -> int:
    """As vLLM counts them: without the flag, one for each rank that this server starts."""
    asked: int | None = parsed.api_server_count
    return asked or parsed.data_parallel_size


def capture_folder(root: Path, parts: Sequence[str]) -> Path:
    """The folder into which the server with these parts captures."""
    return root / "-".join(parts)


def _planned(plan: Plan, *, inspected: bool) -> PlannedServer:
    command, environment = plan.command, {**plan.environment}
    if inspected:
        if WORKER_EXTENSION in command:
            command = [
                INSPECTION_AND_SWAP if word == WORKER_EXTENSION else word for word in command
            ]
        else:
            command = [*command, "--worker-extension-cls", INSPECTION]
        environment |= _DEVELOPMENT
    return PlannedServer(command=command, environment=_environment(environment))


def _environment(own: dict[str, str]) -> dict[str, str]:
    return {**_LOGGING, **machine_environment(), **own}


class TestedServer:
    """A server that runs, until `stop`."""

    def __init__(self, name: str, plan: PlannedServer, session: ClientSession, log: Path) -> None:
        """Starts it; use it after `until_ready`."""
        self._key = secrets.token_hex(16)
        self._session, self._log = session, log
        self._server = Server(
            plan.command, log=log, environment={**plan.environment, KEY: self._key}
        )
        self.load = RunningServer(name, self._server, session)  # to measure it
        self.start_seconds = 0.0
        self._server.start()

    async def until_ready(self, seconds: float) -> None:
        """An EngineError if the server has exited, or is not healthy after so many seconds."""
        began = time.monotonic()
        while not self._server.is_ready():
            if time.monotonic() - began > seconds:
                raise EngineError(
                    f"The server was not healthy after {seconds:.0f} s, all the time that "
                    "--minutes leaves it: increase --minutes"
                )
            await asyncio.sleep(POLL_SECONDS)
        self.start_seconds = time.monotonic() - began
        self.load.resume()

    def stop(self) -> None:
        self._server.stop()

    def log_size(self) -> int:
        return self._log.stat().st_size

    def log_since(self, size: int) -> str:
        with self._log.open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace")

    async def facts(self) -> list[WorkerFacts]:
        """Of every worker."""
        return [WorkerFacts.model_validate(each) for each in await self._call("leadout_facts")]

    async def metrics(self) -> str:
        async with self._session.get(f"{self._server.url}/metrics") as response:
            return await response.text()

    async def complete(self, prompt: str, tokens: int) -> tuple[int, int]:
        """One request that shares no cache entry with others; tokens of prompt and response."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(16),
        }
        answer = await self._ask("POST", "/v1/chat/completions", body)
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    async def record(
        self, prompts: Sequence[str], tokens: int, file: Path
    ) -> list[list[DraftStep]]:
        """The drafter's steps while each of the prompts is answered alone."""
        texts = []
        for prompt in prompts:
            file.unlink(missing_ok=True)
            await self._call("leadout_record")
            await self.complete(prompt, tokens)
            await self._call("leadout_write_record", str(file))
            texts.append(read_steps(file) if file.exists() else [])
        return texts

    async def swap(self, version: int) -> None:
        await self._ask("POST", "/leadout/swap", {"version": version}, key=self._key)

    async def served_version(self) -> tuple[int, str]:
        """The version that the server names, and its fingerprint."""
        answer = await self._ask("GET", "/leadout/drafter", key=self._key)
        return answer["version"], answer["fingerprint"]

    async def _call(self, method: str, *arguments: str) -> list[Any]:
        """A method of all workers."""
        body = {"method": method, "args": arguments}
        found: list[Any] = (await self._ask("POST", "/collective_rpc", body))["results"]
        return found

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, key: str | None = None
    ) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            self._session.request(
                method, self._server.url + path, json=body, headers=headers
            ) as response,
        ):
            if response.status != 200:
                text = (await response.text())[:300]
                raise EngineError(f"{path} answered {response.status}: {text}")
            return await response.json()


if __name__ == "__main__":
    answer_requests(PlanRequest, plan_here)

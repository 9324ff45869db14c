"""The scheduler's part of capture: which finished requests are offered, and which are not."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from leadout.engine.capture import Capture, Finished
from leadout.engine.capture_segments import Segments
from leadout.engine.capture_settings import capture_settings, load_redactor
from leadout.engine.sections import CAPTURE, SectionError
from leadout.engine.small_files import small_file
from leadout.engine.target_info import about_target

logger = init_logger("vllm.leadout")

NAME = "leadout_capture"  # in a request's `vllm_xargs`
ON = "on"  # any other value means: leave this request out
# A request that was aborted or failed has no whole answer. One that ended at a stop string looks
# like an aborted one here: vLLM finds stop strings in its API process.
WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def make_capture(vllm_config: Any) -> Capture:
    settings = capture_settings(vllm_config)
    model = vllm_config.model_config.model
    if settings.folder is None:
        raise SectionError("additional_config: leadout.capture.folder: found nothing, wanted one")
    segments = Segments(
        settings.folder,
        lambda: about_target(model),
        most_bytes=settings.most_bytes,
        most_seconds=settings.most_days * 86400,
    )
    engine = vllm_config.parallel_config.data_parallel_rank
    return Capture(
        segments,
        rate=settings.rate,
        redact=load_redactor(settings.redactor),
        numbers_path=small_file(CAPTURE, vllm_config.instance_id, engine),
        say=lambda line: logger.warning("%s", line),
    )


class Capturing:
    """Goes before a scheduler class of vLLM's; an error costs one log line and the capture."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._capture: Capture | None = None
        try:
            self._capture = make_capture(settings["vllm_config"])
        except Exception as error:
            self._stop_capture(error)

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        if self._capture is not None:
            try:
                finished = finished_of(request)
                if finished is not None and self._capture.wants(finished.request):
                    self._capture.offer(finished)
            except Exception as error:
                self._stop_capture(error)
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        if self._capture is not None:
            self._capture.close()
        super().shutdown()  # type: ignore[misc]

    def _stop_capture(self, error: Exception) -> None:
        self._capture = None
        logger.error(
            "Leadout captures nothing from here on: %s: %s. Serving goes on.",
            type(error).__name__,
            error,
        )


def finished_of(request: Any) -> Finished | None:
    """A request that the target alone answered, from token ids alone, and whose owner agrees."""
    params = request.sampling_params
    if request.status not in WHOLE or params is None or request.prompt_token_ids is None:
        return None
    if request.prompt_embeds is not None or request.mm_features or request.lora_request is not None:
        return None
    if (params.extra_args or {}).get(NAME, ON) != ON:
        return None
    response = list(request.output_token_ids)
    if not response:
        return None
    return Finished(request.request_id, request.prompt_token_ids, response, params.temperature)

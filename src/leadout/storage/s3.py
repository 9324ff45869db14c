"""Storage in S3 and stores with its interface: compare-and-set by conditional writes.

A file is replaced with `If-Match` and the ETag that it was read with, and created with
`If-None-Match: *`. Some stores accept these headers and ignore them, so each process tries once
whether they work, and otherwise holds a lock of objects.

Credentials, region and endpoint come from the usual AWS variables and files, such as
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadout.files import MAX_MIB
from leadout.storage.base import StorageError, Stored
from leadout.storage.objects import ObjectStorage

CONDITIONAL = ".conditional"  # an object to try conditional writes with
NO_TAG = '"00000000000000000000000000000000"'  # the ETag of no content
_CONFLICTS = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_MISSING = {"NoSuchKey", "404"}
_UNKNOWN = {"NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400"}
TRIES = 1  # by s3fs; botocore tries again by itself


class S3Storage(ObjectStorage):
    options: Mapping[str, Any] = {
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": 15,
            "retries": {"mode": "standard", "total_max_attempts": 3},
        }
    }

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        bucket, _, self._prefix = self._root.partition("/")
        if not bucket:
            raise StorageError(f"{url} names no bucket; expected s3://BUCKET/PREFIX.")
        self._bucket = bucket
        self._conditional: bool | None = None  # not tried yet

    @property
    def fs(self) -> Any:
        fs = super().fs
        fs.retries = TRIES
        return fs

    def read(self, name: str, max_mib: int = MAX_MIB) -> Stored | None:
        from fsspec.asyn import sync

        fs = self.fs

        async def get() -> Stored:
            # One request, so that tag and content belong together.
            response = await fs._call_s3("get_object", **self._object(name))
            body = response["Body"]
            try:
                self._require_size(name, response["ContentLength"], max_mib)
                return Stored(await body.read(), response["ETag"])
            finally:
                body.close()

        with self._errors(name):
            try:
                stored: Stored = sync(fs.loop, get)
                return stored
            except FileNotFoundError:
                return None

    def replace(self, name: str, content: bytes, tag: str | None) -> bool:
        if self._conditional is None:
            self._conditional = self._has_conditional_writes()
        if not self._conditional:
            return super().replace(name, content, tag)
        return self._put(name, content, tag)

    def _has_conditional_writes(self) -> bool:
        """Whether the store refuses what it must refuse."""
        try:
            self._put(CONDITIONAL, b"", None)  # it exists from here on
            return not (self._put(CONDITIONAL, b"", None) or self._put(CONDITIONAL, b"", NO_TAG))
        except StorageError as problem:
            if _code(problem) in _UNKNOWN:
                return False
            raise

    def _put(self, name: str, content: bytes, tag: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        with self._errors(name):
            try:
                self.fs.call_s3("put_object", **self._object(name), Body=content, **condition)
            except OSError as problem:
                code = _code(problem)
                if code in _CONFLICTS or (tag is not None and code in _MISSING):
                    return False
                raise
        return True

    def _object(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}".lstrip("/")}


def _code(error: BaseException | None) -> str:
    """The code with which the store has answered, in an error or its causes."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""

"""Where registries and captured traffic are kept: a folder of this machine, or an object store."""

from leadout.storage.base import (
    Entry,
    Place,
    Storage,
    StorageError,
    Stored,
    WrongFilesError,
    is_url,
    resolved,
)
from leadout.storage.folder import FolderStorage

__all__ = [
    "Entry",
    "FolderStorage",
    "Place",
    "Storage",
    "StorageError",
    "Stored",
    "WrongFilesError",
    "is_url",
    "open_storage",
    "resolved",
]


def open_storage(place: str) -> Storage:
    """The storage at a folder or URL, which need not exist yet."""
    if not is_url(place):
        return FolderStorage(place)
    from leadout.storage.objects import ObjectStorage

    if not place.startswith("s3://"):
        return ObjectStorage(place)
    from leadout.storage.s3 import S3Storage

    return S3Storage(place)

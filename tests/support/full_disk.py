"""A disk that is full, as one process sees it.

Invariant: the limit is gone when the block ends. A test must not carry it to its teardown: pytest writes its progress
in between, and where that goes to a file longer than the limit, the whole suite dies.
"""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `room_bytes` inside the block; writing more raises OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

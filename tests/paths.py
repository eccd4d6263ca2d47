"""Where tests find the repository and the optional material beside it."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"
DEMO_MODEL = REPOSITORY / "demo" / "model"

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the shared reference material is not beside the repository"
)

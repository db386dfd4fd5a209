from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference data beside the checkout."""
    folder = Path(os.environ.get("ANYTIME_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "reference" / "expected.json").exists():
        pytest.skip(f"no reference data in {folder}; set ANYTIME_SHARED to the folder that has it")
    return folder

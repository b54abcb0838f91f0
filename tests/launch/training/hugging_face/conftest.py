"""What all tests of this folder share."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def what_was_there_before_is_no_garbage() -> None:
    """accelerate collects garbage around each run of a Trainer, and would look through what other tests have left."""
    gc.freeze()

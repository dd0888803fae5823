"""Runs tests on each of the two GPU backends."""

import pytest

from intflash.backends import get_backend


@pytest.fixture(params=["triton", "cuda"])
def backend(request):
    reason = get_backend(request.param).unavailable()
    if reason:
        pytest.skip(reason)
    return request.param

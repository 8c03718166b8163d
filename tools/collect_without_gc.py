"""Keep the collector of garbage away from pytest's collection of tests.

A plugin of pytest. Imports of torch and of the tests make hardly any garbage, and to look for it takes a fifth of their
time. What they have made is left out of later collections too.
"""

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()

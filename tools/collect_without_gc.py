"""Keep the collector of garbage away from pytest's collection of tests.

A plugin of pytest. Imports of torch and of the tests make hardly any garbage, and a search for garbage takes a fifth of
their time. Later collections leave the imported objects out too.
"""

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()

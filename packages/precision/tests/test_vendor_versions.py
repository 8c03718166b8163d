"""Older versions of a vendor's library are refused, newer ones warned of once, with the tested ones in the message."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from importlib import metadata

import pytest
from torch import nn

from lamella_precision import VendorVersions, _vendor_versions
from lamella_precision.te import replace_quantized_weights

VERSIONS = VendorVersions(distribution="some-kernels", floor="2.11", ceiling="2.12", extra="package[kernels]")


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """No version that was read before, and none afterwards."""
    caches = _vendor_versions._installed, _vendor_versions._warn_once
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("installed", ["2.11.0", "2.11.0+cu13", "2.11.3.post1", "2.11"])
def test_tested_versions_pass(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    VERSIONS.check()


@pytest.mark.parametrize("installed", ["2.10.9", "1.13.0", "2.9"])
def test_older_versions_are_refused_by_name_with_the_extra(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    for _ in range(2):
        with pytest.raises(ImportError) as refusal:
            VERSIONS.check()
        assert str(refusal.value) == (
            f"Expected some-kernels 2.11 or newer, as package[kernels] needs, got {installed}. Install "
            "'some-kernels>=2.11,<2.12', the tested versions, by the extra package[kernels]."
        )


@pytest.mark.parametrize("installed", ["2.12.0", "2.12.0rc1+cu13", "3.0"])
def test_newer_versions_are_warned_of_once(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    expected = (
        "Expected some-kernels below 2.12, as tested with package[kernels] from 2.11 on, got "
        f"{installed}, which may work. Install package[kernels] for a tested version."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"):
        VERSIONS.check()
    VERSIONS.check()  # a second warning would be an error


def test_a_library_without_version_metadata_is_accepted_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VERSIONS.check()


def test_the_door_to_transformer_engine_is_closed_to_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"transformer-engine": "2.9.0"}[name])
    with pytest.raises(
        ImportError, match=r"transformer-engine 2.11 or newer, as lamella-precision\[te\] needs, got 2.9.0"
    ):
        replace_quantized_weights(nn.Linear(2, 2))

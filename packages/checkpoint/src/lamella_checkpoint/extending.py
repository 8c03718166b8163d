"""For packages that open or write checkpoints, as lamella-convert does; names may change in any minor release.

Parts are imported on first use: torch's writers take seconds, and readers of files do not need the import. Sources,
boxes and archives are lamella-files'.

- Files of DCP: `is_dcp`, `open_dcp`, `opened_dcp` and `StoredCheckpoint` read; `write_dcp` and `WithoutManifest` write;
  `complete` writes the metadata of all ranks' items (`Placed` at a `ByteSpan`); `Manifest` is the file beside.
- Native names: `native` makes an `Opened` of a source with a foreign nesting, by `Keys` and a model's `LiveNames`.
- A live model's part on this rank: `StateContents`, `Share`, `Item`, `Encoded`, `recut`, `differing`;
  `save_part` writes.
- Decisions that ranks make together: `everywhere`, `exchange`, `on_rank_zero`, `rank`, `num_ranks`, `on_device_of`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lamella_checkpoint._base.manifest import MANIFEST_FILE as MANIFEST_FILE
    from lamella_checkpoint._base.manifest import Manifest as Manifest
    from lamella_checkpoint._base.opened import ForLive as ForLive
    from lamella_checkpoint._base.opened import Opened as Opened
    from lamella_checkpoint._base.opened import native as native
    from lamella_checkpoint._base.ranks import everywhere as everywhere
    from lamella_checkpoint._base.ranks import exchange as exchange
    from lamella_checkpoint._base.ranks import num_ranks as num_ranks
    from lamella_checkpoint._base.ranks import on_device_of as on_device_of
    from lamella_checkpoint._base.ranks import on_rank_zero as on_rank_zero
    from lamella_checkpoint._base.ranks import rank as rank
    from lamella_checkpoint._base.sections import Keys as Keys
    from lamella_checkpoint._base.sections import LiveNames as LiveNames
    from lamella_checkpoint._formats.checksums import CHECKSUMS_FILE as CHECKSUMS_FILE
    from lamella_checkpoint._formats.checksums import ByteSpan as ByteSpan
    from lamella_checkpoint._formats.dcp_from_source import write_dcp as write_dcp
    from lamella_checkpoint._formats.dcp_open import is_dcp as is_dcp
    from lamella_checkpoint._formats.dcp_open import open_dcp as open_dcp
    from lamella_checkpoint._formats.dcp_open import opened_dcp as opened_dcp
    from lamella_checkpoint._formats.dcp_read import StoredCheckpoint as StoredCheckpoint
    from lamella_checkpoint._formats.dcp_write import WithoutManifest as WithoutManifest
    from lamella_checkpoint._formats.dcp_write import complete as complete
    from lamella_checkpoint._formats.extra_by_rank import is_of_extra as is_of_extra
    from lamella_checkpoint._formats.placed import Placed as Placed
    from lamella_checkpoint._state.contents import Ranks as Ranks
    from lamella_checkpoint._state.contents import StateContents as StateContents
    from lamella_checkpoint._state.recut import recut as recut
    from lamella_checkpoint._state.shares import Encoded as Encoded
    from lamella_checkpoint._state.shares import Item as Item
    from lamella_checkpoint._state.shares import Share as Share
    from lamella_checkpoint._state.shares import differing as differing
    from lamella_checkpoint._training.save import SavePart as SavePart
    from lamella_checkpoint._training.save import save_part as save_part

_LATER: Final = {
    "lamella_checkpoint._base.manifest": ("MANIFEST_FILE", "Manifest"),
    "lamella_checkpoint._base.opened": ("ForLive", "Opened", "native"),
    "lamella_checkpoint._base.ranks": ("everywhere", "exchange", "num_ranks", "on_device_of", "on_rank_zero", "rank"),
    "lamella_checkpoint._base.sections": ("Keys", "LiveNames"),
    "lamella_checkpoint._formats.checksums": ("CHECKSUMS_FILE", "ByteSpan"),
    "lamella_checkpoint._formats.dcp_from_source": ("write_dcp",),
    "lamella_checkpoint._formats.dcp_open": ("is_dcp", "open_dcp", "opened_dcp"),
    "lamella_checkpoint._formats.dcp_read": ("StoredCheckpoint",),
    "lamella_checkpoint._formats.dcp_write": ("WithoutManifest", "complete"),
    "lamella_checkpoint._formats.extra_by_rank": ("is_of_extra",),
    "lamella_checkpoint._formats.placed": ("Placed",),
    "lamella_checkpoint._state.contents": ("StateContents", "Ranks"),
    "lamella_checkpoint._state.recut": ("recut",),
    "lamella_checkpoint._state.shares": ("Encoded", "Item", "Share", "differing"),
    "lamella_checkpoint._training.save": ("SavePart", "save_part"),
}
_HOMES: Final = {name: module for module, names in _LATER.items() for name in names}

if not TYPE_CHECKING:  # A type checker that saw `__getattr__` would accept any name of the module.

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        part = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return part


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]

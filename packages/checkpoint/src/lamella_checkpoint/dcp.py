"""Parts for a further format on torch DCP: the files read, the manifest.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._base.extra import encode_extra as encode_extra
from lamella_checkpoint._base.manifest import MANIFEST_FILE as MANIFEST_FILE
from lamella_checkpoint._base.manifest import Manifest as Manifest
from lamella_checkpoint._formats.checksums import CHECKSUMS_FILE as CHECKSUMS_FILE
from lamella_checkpoint._formats.dcp_open import is_dcp as is_dcp
from lamella_checkpoint._formats.dcp_open import opened_dcp as opened_dcp
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint as StoredCheckpoint

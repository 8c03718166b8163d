"""Writers of torch DCP, from a source and from ranks' items; apart from readers, as torch's writers import slowly.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._formats.dcp_from_source import write_dcp as write_dcp
from lamella_checkpoint._formats.dcp_write import WithoutManifest as WithoutManifest

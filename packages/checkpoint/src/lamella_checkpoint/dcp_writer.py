"""A writer of torch DCP from a source; apart from the readers, as torch's own writers take a second to import.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._formats.dcp_from_source import write_dcp as write_dcp

"""Parts for a further format: sources over sources, boxes, native names, correspondences.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._base.boxes import are_sizes as are_sizes
from lamella_checkpoint._base.boxes import box_of as box_of
from lamella_checkpoint._base.boxes import first_overlap as first_overlap
from lamella_checkpoint._base.boxes import whole_box as whole_box
from lamella_checkpoint._base.correspondence import Side as Side
from lamella_checkpoint._base.correspondence import carried as carried
from lamella_checkpoint._base.correspondence import meetings as meetings
from lamella_checkpoint._base.file_boxes import pieces as pieces
from lamella_checkpoint._base.names import MODEL as MODEL
from lamella_checkpoint._base.names import OPTIONS as OPTIONS
from lamella_checkpoint._base.names import STATE as STATE
from lamella_checkpoint._base.names import in_model as in_model
from lamella_checkpoint._base.names import is_of_model as is_of_model
from lamella_checkpoint._base.names import longest_known as longest_known
from lamella_checkpoint._base.names import own_name as own_name
from lamella_checkpoint._base.names import split_section as split_section
from lamella_checkpoint._base.opened import ForLive as ForLive
from lamella_checkpoint._base.opened import Opened as Opened
from lamella_checkpoint._base.opened import native as native
from lamella_checkpoint._base.renamed import Renamed as Renamed
from lamella_checkpoint._base.renamed import WithObjects as WithObjects
from lamella_checkpoint._base.renamed import rename as rename
from lamella_checkpoint._base.renamed import two_names as two_names
from lamella_checkpoint._base.sections import Keys as Keys
from lamella_checkpoint._base.sections import LiveNames as LiveNames
from lamella_checkpoint._base.source import Over as Over
from lamella_checkpoint._base.stream import BUFFER_NBYTES as BUFFER_NBYTES
from lamella_checkpoint._base.stream import OnBytes as OnBytes
from lamella_checkpoint._base.stream import WriteOptions as WriteOptions
from lamella_checkpoint._base.stream import objects_once as objects_once
from lamella_checkpoint._base.stream import stream as stream

"""Parts for a further format: files read safely, boxes of files, directories that appear whole, findings.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._base.directories import METADATA_FILE as METADATA_FILE
from lamella_checkpoint._base.directories import check_vacant as check_vacant
from lamella_checkpoint._base.directories import find as find
from lamella_checkpoint._base.directories import publish as publish
from lamella_checkpoint._base.directories import stage as stage
from lamella_checkpoint._base.directories import sync as sync
from lamella_checkpoint._base.file_boxes import Stored as Stored
from lamella_checkpoint._base.file_boxes import read_box as read_box
from lamella_checkpoint._base.file_boxes import write_box as write_box
from lamella_checkpoint._base.findings import Findings as Findings
from lamella_checkpoint._base.findings import OnProgress as OnProgress
from lamella_checkpoint._base.findings import verification as verification
from lamella_checkpoint._base.pickles import Inert as Inert
from lamella_checkpoint._base.pickles import read_pickle as read_pickle
from lamella_checkpoint._base.small_files import file_size as file_size
from lamella_checkpoint._base.small_files import read_bytes as read_bytes
from lamella_checkpoint._base.small_files import read_json as read_json
from lamella_checkpoint._base.small_files import read_text as read_text
from lamella_checkpoint._base.small_files import unreadable as unreadable
from lamella_checkpoint._base.text import printable as printable
from lamella_checkpoint._base.text import short as short

"""Parts for a further format: tensors read from archives of `torch.save`.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._formats.items import Copy as Copy
from lamella_checkpoint._formats.items import ItemRead as ItemRead
from lamella_checkpoint._formats.items import check_tensors as check_tensors
from lamella_checkpoint._formats.items import read_tensors as read_tensors
from lamella_checkpoint._formats.metadata import Item as Item
from lamella_checkpoint._formats.objects import Expected as Expected
from lamella_checkpoint._formats.objects import unsafe_types as unsafe_types
from lamella_checkpoint._formats.torch_zip import FileSlice as FileSlice
from lamella_checkpoint._formats.torch_zip import Record as Record
from lamella_checkpoint._formats.torch_zip import StoredTensor as StoredTensor
from lamella_checkpoint._formats.torch_zip import TensorRecord as TensorRecord
from lamella_checkpoint._formats.torch_zip import check_places as check_places
from lamella_checkpoint._formats.torch_zip import checksum as checksum
from lamella_checkpoint._formats.torch_zip import is_little_endian as is_little_endian
from lamella_checkpoint._formats.torch_zip import read_record as read_record
from lamella_checkpoint._formats.torch_zip import records as records
from lamella_checkpoint._formats.torch_zip import storage_class as storage_class
from lamella_checkpoint._formats.torch_zip import storage_records as storage_records
from lamella_checkpoint._formats.torch_zip import stored_tensor as stored_tensor

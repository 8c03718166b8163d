"""Who owns which elements: layouts of sharded tensors as arithmetic on integers."""

from torch.distributed.tensor import Partial as Partial
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor import Shard as Shard

from lamella_layout._chunk import Chunk as Chunk
from lamella_layout._even import EvenLayout as EvenLayout
from lamella_layout._flat import FlatLayout as FlatLayout
from lamella_layout._keep import Keep as Keep
from lamella_layout._keep import Rows as Rows
from lamella_layout._keep import Whole as Whole
from lamella_layout._mesh import mesh_chunks as mesh_chunks
from lamella_layout._mesh import mesh_region as mesh_region
from lamella_layout._mesh import strided_placements as strided_placements
from lamella_layout._picture import picture as picture
from lamella_layout._ragged import RaggedShard as RaggedShard
from lamella_layout._ragged import ragged_rows as ragged_rows
from lamella_layout._range import Range as Range
from lamella_layout._region import Region as Region

"""Parts for a further format: a live model's shards on this rank, and decisions that ranks make together.

For packages that open or write checkpoints, as lamella-convert does. Names may change in any minor release.
"""

from lamella_checkpoint._base.ranks import everywhere as everywhere
from lamella_checkpoint._base.ranks import exchange as exchange
from lamella_checkpoint._base.ranks import num_ranks as num_ranks
from lamella_checkpoint._base.ranks import on_device_of as on_device_of
from lamella_checkpoint._base.ranks import on_rank_zero as on_rank_zero
from lamella_checkpoint._base.ranks import rank as rank
from lamella_checkpoint._state.contents import Contents as Contents
from lamella_checkpoint._state.contents import Ranks as Ranks
from lamella_checkpoint._state.recut import recut as recut
from lamella_checkpoint._state.shares import Encoded as Encoded
from lamella_checkpoint._state.shares import Item as Item
from lamella_checkpoint._state.shares import Share as Share
from lamella_checkpoint._state.shares import differing as differing
from lamella_checkpoint._training.save import Part as Part
from lamella_checkpoint._training.save import save_part as save_part

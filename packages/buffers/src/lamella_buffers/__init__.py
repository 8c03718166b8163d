"""Sharded storage and the collectives that move it."""

from lamella_buffers._allocator import Allocator as Allocator
from lamella_buffers._allocator import CachingAllocator as CachingAllocator
from lamella_buffers._allocator import MemPoolAllocator as MemPoolAllocator
from lamella_buffers._buffer import ShardedBuffer as ShardedBuffer
from lamella_buffers._buffer import UnshardedBuffer as UnshardedBuffer
from lamella_buffers._buffer import standalone as standalone
from lamella_buffers._payload import Payload as Payload
from lamella_buffers._payload import by_dtype as by_dtype
from lamella_buffers._payload import of_one_dtype as of_one_dtype
from lamella_buffers._payload import pack as pack
from lamella_buffers._payload import unpack as unpack
from lamella_buffers._pool import PoolAllocator as PoolAllocator
from lamella_buffers._pool import PoolReport as PoolReport
from lamella_buffers._redistribute import all_gather as all_gather
from lamella_buffers._redistribute import all_reduce as all_reduce
from lamella_buffers._redistribute import reduce_scatter as reduce_scatter
from lamella_buffers._transport import Done as Done
from lamella_buffers._transport import GlooTransport as GlooTransport
from lamella_buffers._transport import LocalTransport as LocalTransport
from lamella_buffers._transport import NcclTransport as NcclTransport
from lamella_buffers._transport import Pending as Pending
from lamella_buffers._transport import ReduceOp as ReduceOp
from lamella_buffers._transport import Transport as Transport
from lamella_buffers._transport import transport_for as transport_for

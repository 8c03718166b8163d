"""For tests of packages that build on the engine: units' state, logs of collectives, streams without a device.

Training programs need none of the names; the names may change with a minor version of the engine.

- State: `named_units`, `require_unit`, `tree_of` and `streams_of` find units; `held_nbytes`, `unsharded_nbytes` and
  `Residency` (`unit.weights.residency`) tell their memory; `assert_at_rest` asserts that shards alone hold memory.
- Collectives: `record` starts a `CollectiveLog` of units' gathers and reductions.
- Streams: `fake_streams` runs a model on a CPU with `FakeStreams`, whose `FakeWork` tells the streams and events
  after the work. `WaitingStream` lists its waits.
- Changes of the engine: `flat_alignment` cuts small parameters, `reductions_in` widens the wire of reductions;
  `gradient_installs_watched` and `gather_preparations_watched` call a test at a moment of the engine.
- Optimizer hooks: `BEFORE_STEP` and `AFTER_STEP` are the tables of functions around each optimizer step, in
  order, once `register_step_hooks` has put `after_step` and `lamella_engine.extending.before_step` in torch's tables.
"""

from lamella_engine._optimizer_hooks import AFTER_STEP as AFTER_STEP
from lamella_engine._optimizer_hooks import BEFORE_STEP as BEFORE_STEP
from lamella_engine._optimizer_hooks import after_step as after_step
from lamella_engine._optimizer_hooks import register_step_hooks as register_step_hooks
from lamella_engine._streams.streams import Streams as Streams
from lamella_engine._testing.collective_log import CollectiveLog as CollectiveLog
from lamella_engine._testing.collective_log import LoggedCollective as LoggedCollective
from lamella_engine._testing.collective_log import record as record
from lamella_engine._testing.fake_streams import FakeEvent as FakeEvent
from lamella_engine._testing.fake_streams import FakeStream as FakeStream
from lamella_engine._testing.fake_streams import FakeStreams as FakeStreams
from lamella_engine._testing.fake_streams import FakeWork as FakeWork
from lamella_engine._testing.fake_streams import WaitingStream as WaitingStream
from lamella_engine._testing.fake_streams import fake_streams as fake_streams
from lamella_engine._testing.patches import flat_alignment as flat_alignment
from lamella_engine._testing.patches import gather_preparations_watched as gather_preparations_watched
from lamella_engine._testing.patches import gradient_installs_watched as gradient_installs_watched
from lamella_engine._testing.patches import reductions_in as reductions_in
from lamella_engine._testing.readers import assert_at_rest as assert_at_rest
from lamella_engine._testing.readers import held_nbytes as held_nbytes
from lamella_engine._testing.readers import named_units as named_units
from lamella_engine._testing.readers import require_unit as require_unit
from lamella_engine._testing.readers import streams_of as streams_of
from lamella_engine._testing.readers import tree_of as tree_of
from lamella_engine._testing.readers import unsharded_nbytes as unsharded_nbytes
from lamella_engine._unit.weights import Residency as Residency

__all__ = [
    "AFTER_STEP",
    "BEFORE_STEP",
    "CollectiveLog",
    "FakeEvent",
    "FakeStream",
    "FakeStreams",
    "FakeWork",
    "LoggedCollective",
    "Residency",
    "Streams",
    "WaitingStream",
    "after_step",
    "assert_at_rest",
    "fake_streams",
    "flat_alignment",
    "gather_preparations_watched",
    "gradient_installs_watched",
    "held_nbytes",
    "named_units",
    "record",
    "reductions_in",
    "register_step_hooks",
    "require_unit",
    "streams_of",
    "tree_of",
    "unsharded_nbytes",
]

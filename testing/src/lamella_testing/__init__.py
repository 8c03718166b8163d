"""Multi-rank tests in a fraction of a second: run a function on every rank of a fresh process group."""

from lamella_testing._compiler import load_compiler as load_compiler
from lamella_testing._installed import write_entry_points as write_entry_points
from lamella_testing._parity import assert_trains_as_unsharded as assert_trains_as_unsharded
from lamella_testing._ranks import RankFailure as RankFailure
from lamella_testing._ranks import RankTimeout as RankTimeout
from lamella_testing._ranks import run_ranks as run_ranks
from lamella_testing._ranks import start_autograd as start_autograd
from lamella_testing._ranks import take_gpu as take_gpu
from lamella_testing._team import Team as Team

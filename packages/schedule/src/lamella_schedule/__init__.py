"""Orders of forwards and backwards as data, of pairs of microbatches and of pipelines: drawn, simulated and run."""

from typing import TYPE_CHECKING
from warnings import warn

from lamella_schedule._chunk import LayerSlots as LayerSlots
from lamella_schedule._chunk import ModelChunk as ModelChunk
from lamella_schedule._draw import bars as bars
from lamella_schedule._draw import exposures as exposures
from lamella_schedule._draw import svg as svg
from lamella_schedule._draw import table as table
from lamella_schedule._events import Action as Action
from lamella_schedule._events import Event as Event
from lamella_schedule._events import Kind as Kind
from lamella_schedule._events import Lane as Lane
from lamella_schedule._events import LayerPlan as LayerPlan
from lamella_schedule._events import Phase as Phase
from lamella_schedule._events import ResidenceEvent as ResidenceEvent
from lamella_schedule._events import Slot as Slot
from lamella_schedule._exchange import Splits as Splits
from lamella_schedule._exchange import exchange as exchange
from lamella_schedule._exchange import route as route
from lamella_schedule._exchange import unroute as unroute
from lamella_schedule._flight import Flight as Flight
from lamella_schedule._lanes import Lanes as Lanes
from lamella_schedule._measure import Stopwatch as Stopwatch
from lamella_schedule._order import order as order
from lamella_schedule._order import run_order as run_order
from lamella_schedule._order import with_residence as with_residence
from lamella_schedule._order import work as work
from lamella_schedule._passes import PassKind as PassKind
from lamella_schedule._passes import PassPair as PassPair
from lamella_schedule._passes import PipelineEvent as PipelineEvent
from lamella_schedule._passes import StagePass as StagePass
from lamella_schedule._passes import TransferAction as TransferAction
from lamella_schedule._passes import TransferEvent as TransferEvent
from lamella_schedule._passes import WorkEvent as WorkEvent
from lamella_schedule._passes import passes_in as passes_in
from lamella_schedule._peaks import peak as peak
from lamella_schedule._peaks import peak_parameters as peak_parameters
from lamella_schedule._pipeline import Pipeline as Pipeline
from lamella_schedule._pipeline_events import pipeline_events as pipeline_events
from lamella_schedule._pipeline_events import rank_events as rank_events
from lamella_schedule._pipeline_orders import pipeline as pipeline
from lamella_schedule._run import Residence as Residence
from lamella_schedule._run import run as run
from lamella_schedule._run import run_pair as run_pair
from lamella_schedule._run_pipeline import run_pipeline as run_pipeline
from lamella_schedule._simulate import simulate as simulate
from lamella_schedule._simulate import simulate_pipeline as simulate_pipeline
from lamella_schedule._streams import StreamOperation as StreamOperation
from lamella_schedule._streams import StreamSpan as StreamSpan
from lamella_schedule._streams import simulate_streams as simulate_streams
from lamella_schedule._timeline import PipelineTimeline as PipelineTimeline
from lamella_schedule._timeline import Span as Span
from lamella_schedule._timeline import Timeline as Timeline

if not TYPE_CHECKING:  # Hidden from type checkers: a module `__getattr__` makes every misspelt name type-check.

    def __getattr__(name: str) -> object:
        if name != "Chunk":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warn(
            "lamella_schedule.Chunk is deprecated and will be removed in lamella-schedule 0.2: use ModelChunk.",
            FutureWarning,
            stacklevel=2,
        )
        return ModelChunk

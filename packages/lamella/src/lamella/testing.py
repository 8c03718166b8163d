"""A run's files and parts, for tests and benchmarks of other packages."""

from lamella._command.estimate import placed as placed
from lamella._command.parser import config_of as config_of
from lamella._command.parser import parse as parse
from lamella._data.order import BatchStream as BatchStream
from lamella._data.tokens import load_tokens as load_tokens
from lamella._estimate.fake_ranks import fake_ranks as fake_ranks
from lamella._estimate.fake_ranks import no_memory as no_memory
from lamella._estimate.kinds import adopt_model as adopt_model
from lamella._estimate.live_bytes import LiveBytes as LiveBytes
from lamella._estimate.recorded_step import moments_of_units as moments_of_units
from lamella._model.building import build as build
from lamella._model.checks import check_model as check_model
from lamella._model.lora import lora_settings as lora_settings
from lamella._model.spec import load_spec as load_spec
from lamella._model.weights import check_weights as check_weights
from lamella._plan.calibration import Calibration as Calibration
from lamella._plan.calibration import calibrate as calibrate
from lamella._plan.cluster import CLUSTERS as CLUSTERS
from lamella._plan.cluster import Cluster as Cluster
from lamella._plan.cluster import read_cluster as read_cluster
from lamella._plan.recorded_works import RecordedWorks as RecordedWorks
from lamella._plan.recorded_works import record_module_works as record_module_works
from lamella._plan.recorded_works import record_works as record_works
from lamella._plan.step_plan import StepPlan as StepPlan
from lamella._plan.step_plan import plan_of as plan_of
from lamella._plan.works import Work as Work
from lamella._plan.works import WorkKind as WorkKind
from lamella._processes.placement import Rank as Rank
from lamella._record.metrics import StepRecord as StepRecord
from lamella._record.metrics import read as read_metrics
from lamella._record.run_directory import RunDirectory as RunDirectory
from lamella._settings.config import resolve as resolve
from lamella._settings.files import read_file as read_file
from lamella._settings.options import ConfigError as ConfigError
from lamella._training.bare_steps import bare_steps as bare_steps
from lamella._training.optimizer import learning_rate as learning_rate
from lamella._training.optimizer import make_optimizer as make_optimizer
from lamella._training.preparation import prepare as prepare
from lamella_transformers import build_model as build_model

__all__ = [
    "CLUSTERS",
    "BatchStream",
    "Calibration",
    "Cluster",
    "ConfigError",
    "LiveBytes",
    "Rank",
    "RecordedWorks",
    "RunDirectory",
    "StepPlan",
    "StepRecord",
    "Work",
    "WorkKind",
    "adopt_model",
    "bare_steps",
    "build",
    "build_model",
    "calibrate",
    "check_model",
    "check_weights",
    "config_of",
    "fake_ranks",
    "learning_rate",
    "load_spec",
    "load_tokens",
    "lora_settings",
    "make_optimizer",
    "moments_of_units",
    "no_memory",
    "parse",
    "placed",
    "plan_of",
    "prepare",
    "read_cluster",
    "read_file",
    "read_metrics",
    "record_module_works",
    "record_works",
    "resolve",
]

"""Any causal language model of transformers under `fully_shard`: units, dtypes, weights, losses, kernels, experts.

`lamella_transformers.experts` spreads the experts of a mixture over ranks. Names of this module import torch, and
transformers only where they are called.
"""

from lamella_transformers._adapters import GROUP as GROUP
from lamella_transformers._adapters import Adapter as Adapter
from lamella_transformers._adapters import DtypeRule as DtypeRule
from lamella_transformers._adapters import find_adapter as find_adapter
from lamella_transformers._building import build_model as build_model
from lamella_transformers._building import build_without_parameters as build_without_parameters
from lamella_transformers._building import materialise as materialise
from lamella_transformers._chunked_loss import IGNORED as IGNORED
from lamella_transformers._chunked_loss import DeferredHead as DeferredHead
from lamella_transformers._chunked_loss import linear_cross_entropy as linear_cross_entropy
from lamella_transformers._construction import ModelSpec as ModelSpec
from lamella_transformers._conversion import correspondences as correspondences
from lamella_transformers._documents import document_arguments as document_arguments
from lamella_transformers._documents import one_document_a_sequence as one_document_a_sequence
from lamella_transformers._documents import separates_documents as separates_documents
from lamella_transformers._errors import ModelError as ModelError
from lamella_transformers._fresh import FreshWeights as FreshWeights
from lamella_transformers._kernels import Replacements as Replacements
from lamella_transformers._kernels import has_kernels as has_kernels
from lamella_transformers._kernels import has_liger as has_liger
from lamella_transformers._kernels import use_kernels as use_kernels
from lamella_transformers._lora import LoraSettings as LoraSettings
from lamella_transformers._lora import add_lora as add_lora
from lamella_transformers._lora import has_peft as has_peft
from lamella_transformers._lora import lora_config as lora_config
from lamella_transformers._lora import lora_layers as lora_layers
from lamella_transformers._lora_weights import FreshLora as FreshLora
from lamella_transformers._lora_weights import MergedLora as MergedLora
from lamella_transformers._lora_weights import as_peft as as_peft
from lamella_transformers._loss import LossFunction as LossFunction
from lamella_transformers._loss import MicrobatchLoss as MicrobatchLoss
from lamella_transformers._loss import ModelLoss as ModelLoss
from lamella_transformers._loss import assumed_loss as assumed_loss
from lamella_transformers._loss import choose_loss as choose_loss
from lamella_transformers._loss import loss_of_logits as loss_of_logits
from lamella_transformers._loss import target_losses as target_losses
from lamella_transformers._outline import outline as outline
from lamella_transformers._profiling import NUM_PROFILER_WARMUP_STEPS as NUM_PROFILER_WARMUP_STEPS
from lamella_transformers._profiling import step_profiler as step_profiler
from lamella_transformers._sizes import balance_coefficient as balance_coefficient
from lamella_transformers._sizes import flops_per_token as flops_per_token
from lamella_transformers._sizes import num_positions as num_positions
from lamella_transformers._units import UnitChoice as UnitChoice
from lamella_transformers._units import choose_units as choose_units
from lamella_transformers._units import fp32_parameters as fp32_parameters
from lamella_transformers._units import sharding_units as sharding_units
from lamella_transformers._weights import as_published as as_published
from lamella_transformers._weights import check_weights as check_weights
from lamella_transformers._weights import fingerprint_of_weights as fingerprint_of_weights
from lamella_transformers._weights import load_weights as load_weights

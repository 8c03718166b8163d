"""Number formats of sharded training: the frozen policy, and the recipes for weights on the wire."""

from lamella_precision._choice.foreign import is_quantized as is_quantized
from lamella_precision._choice.foreign import read_directly as read_directly
from lamella_precision._choice.foreign import refuse_quantized as refuse_quantized
from lamella_precision._choice.matrices import matrices_of as matrices_of
from lamella_precision._choice.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from lamella_precision._products.devices import multiplies_in_float8 as multiplies_in_float8
from lamella_precision._products.float8_linear import Float8Linear as Float8Linear
from lamella_precision._products.float8_linear import drop_float8_matmul as drop_float8_matmul
from lamella_precision._products.float8_linear import float8_matmul_layers as float8_matmul_layers
from lamella_precision._products.float8_linear import use_float8_matmul as use_float8_matmul
from lamella_precision._protocol import CachingRecipe as CachingRecipe
from lamella_precision._protocol import Direction as Direction
from lamella_precision._protocol import DivisibleRecipe as DivisibleRecipe
from lamella_precision._protocol import PayloadFormat as PayloadFormat
from lamella_precision._protocol import Recipe as Recipe
from lamella_precision._protocol import ScaledRecipe as ScaledRecipe
from lamella_precision._protocol import WeightRows as WeightRows
from lamella_precision._recipes.float8 import Float8Recipe as Float8Recipe
from lamella_precision._recipes.mxfp8 import MXFP8Recipe as MXFP8Recipe
from lamella_precision._recipes.plain import PlainRecipe as PlainRecipe
from lamella_precision._scales.assumed_kernels import assume_float8_kernels as assume_float8_kernels
from lamella_precision._vendor_versions import VendorVersions as VendorVersions
from lamella_precision._weights.quantized import Dequantizes as Dequantizes
from lamella_precision._weights.quantized import QuantizedWeight as QuantizedWeight

"""Number formats of sharded training: the frozen policy, and the recipes for weights on the wire."""

from lamella_precision._policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from lamella_precision._recipe import Direction as Direction
from lamella_precision._recipe import PayloadFormat as PayloadFormat
from lamella_precision._recipe import PlainRecipe as PlainRecipe
from lamella_precision._recipe import Recipe as Recipe

"""The units under one outermost unit: order, prefetch, passes."""

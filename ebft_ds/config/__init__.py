"""Recipes and their meaning. Imports neither torch nor transformers."""

from ebft_ds.config.async_ebft import AsyncEBFTConfig
from ebft_ds.config.loader import LoadedRecipe, load_recipe

__all__ = ["AsyncEBFTConfig", "LoadedRecipe", "load_recipe"]

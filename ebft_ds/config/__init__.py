"""Recipes and their meaning. Imports neither torch nor transformers."""

from ebft_ds.config.async_ebft import AsyncEBFTConfig
from ebft_ds.config.loader import LoadedRecipe, load_recipe
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.config.reward import RewardConfig

__all__ = ["AsyncEBFTConfig", "LoadedRecipe", "RecipeConfig", "RewardConfig", "load_recipe"]

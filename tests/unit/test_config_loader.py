"""Recipes: layers, overrides, aliases, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.config import AsyncEBFTConfig, load_recipe
from ebft_ds.config.aliases import ALIASES
from ebft_ds.config.fields import FIELDS
from ebft_ds.errors import ConfigError


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(folder, text), overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_sections_flat_names_and_dotted_overrides_are_one(tmp_path: Path) -> None:
    flat = load_recipe(write(tmp_path, "learning_rate: 1e-4\nseed: 7\n")).config
    grouped = load_recipe(write(tmp_path, "optim: {learning_rate: 1e-4}\nrun:\n  seed: 7\n")).config
    overridden = load_recipe(write(tmp_path, ""), ["optim.learning_rate=1e-4", "seed=7"]).config
    python = AsyncEBFTConfig(learning_rate=1e-4, run={"seed": 7})
    assert flat == grouped == overridden == python
    assert flat.optim.learning_rate == 0.0001


def test_later_layers_win_whatever_the_spelling(tmp_path: Path) -> None:
    write(tmp_path, "num_generations: 2\nseed: 1\ntemperature: 0.5\n", "base.yaml")
    write(tmp_path, "seed: 2\n", "middle.yaml")
    loaded = load_recipe(write(tmp_path, "include: [base.yaml, middle.yaml]\nn_samples_per_prompt: 8\n"), ["temperature=0.7"])
    assert loaded.config.rollout.num_generations == 8
    assert loaded.config.run.seed == 2
    assert loaded.config.rollout.temperature == 0.7
    assert [path.name for path in loaded.files] == ["base.yaml", "middle.yaml", "recipe.yaml"]
    assert str(loaded.sources["seed"]).endswith("middle.yaml:1")


def test_include_is_relative_to_the_including_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared", "seed: 5\n", "base.yaml")
    recipe = write(tmp_path / "shared", "include: base.yaml\n", "child.yaml")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_recipe(recipe).config.run.seed == 5


def test_include_in_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "include: recipe.yaml\n", "other.yaml")
    assert "includes itself" in refusal(tmp_path, "include: other.yaml\n")


def test_unknown_key_names_file_line_and_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, "seed: 1\nlearnin_rate: 1e-4\n")
    assert "recipe.yaml:2" in message
    assert "did you mean learning_rate?" in message


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "num_generations: 0\ndtype: fp8\nloss:\n  beta: -1\n")
    assert "recipe.yaml:1: num_generations: 0 is not allowed" in message
    assert "Allowed: one of float32, bfloat16, float16" in message
    assert "recipe.yaml:4: beta: -1" in message


def test_wrong_section_names_the_right_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, "optim:\n  seed: 1\n")
    assert "recipe.yaml:2: seed does not belong to section optim: it is a field of section run" in message
    assert "section run" in refusal(tmp_path, "", "optim.seed=1")


def test_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert "recipe.yaml:3: seed is given twice (first in line 1)" in refusal(tmp_path, "seed: 1\nbeta: 0\nseed: 2\n")
    assert "top_k is given twice" in refusal(tmp_path, "generation_kwargs: {top_k: 1, top_k: 2}\n")


def test_field_given_flat_and_in_its_section_must_agree(tmp_path: Path) -> None:
    assert "contradicts" in refusal(tmp_path, "seed: 1\nrun: {seed: 2}\n")
    assert load_recipe(write(tmp_path, "seed: 1\nrun: {seed: 1}\n")).config.run.seed == 1


def test_alias_is_reported_and_conflict_refused(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, "feature_layers: [0.5]\nmax_off_policy_steps: 3\n"))
    assert loaded.config.method.ebft_feature_layers == [0.5]
    assert loaded.config.rollout.max_staleness == 3
    assert any("feature_layers is read as ebft_feature_layers" in note for note in loaded.notes)
    message = refusal(tmp_path, "num_generations: 4\nn_samples_per_prompt: 8\n")
    assert "n_samples_per_prompt: 8 contradicts num_generations: 4" in message


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("n_samples_per_prompt", "num_generations"),
        ("vllm_sync_interval", "vllm_merge_check_interval"),
        ("weight_sync_steps", "vllm_merge_check_interval"),
        ("max_off_policy_steps", "max_staleness"),
        ("torch_dtype", "dtype"),
        ("embed_method", "ebft_embed_method"),
        ("use_whitening", "ebft_use_whitening"),
        ("alignment_coef", "ebft_alignment_coef"),
        ("ce_coef", "ebft_ce_coef"),
        ("rl_coef", "ebft_rl_coef"),
        ("gt_length_multiplier", "ebft_gt_length_multiplier"),
        ("ebft_temperature", "temperature"),
        ("ebft_warm_start_steps", "warm_start_steps"),
        ("warm_start", "warm_start_steps"),
    ],
)
def test_promised_spellings(alias: str, field: str) -> None:
    assert ALIASES[alias] == field


def test_aliases_lead_to_fields_and_never_hide_one() -> None:
    assert set(ALIASES.values()) <= set(FIELDS)
    assert not set(ALIASES) & set(FIELDS)


@pytest.mark.parametrize(("text", "line"), [("a: [1, 2\nb: 3\n", 2), ("seed: 1\n  beta: 2\n", 2), ("seed: '1\n", 1)])
def test_bad_yaml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    message = refusal(tmp_path, text)
    assert "not valid YAML" in message
    assert any(f"recipe.yaml:{number}" in message for number in (line, line + 1))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n"])
def test_a_recipe_is_a_mapping(tmp_path: Path, text: str) -> None:
    assert "a recipe is a mapping" in refusal(tmp_path, text)


def test_missing_recipe_and_malformed_overrides(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load_recipe(tmp_path / "absent.yaml")
    assert "not of the form key=value" in refusal(tmp_path, "", "seed")
    assert "override seed=[1: the value is not valid YAML" in refusal(tmp_path, "", "seed=[1")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E+2", 100.0), ("-2.5e-3", -0.0025), (".5", 0.5), ("010", 10.0), ("1_000", 1000.0), ("3", 3.0)],
)
def test_numbers_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    assert load_recipe(write(tmp_path, f"ebft_alignment_coef: {text}\n")).config.method.ebft_alignment_coef == value


@given(st.floats(min_value=1e-12, max_value=1e6, allow_subnormal=False))
def test_any_float_survives_an_override(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    recipe = tmp_path_factory.getbasetemp() / "empty.yaml"
    recipe.write_text("")
    assert load_recipe(recipe, [f"learning_rate={value!r}"]).config.optim.learning_rate == value


@pytest.mark.parametrize(
    "override", ["seed=true", "top_p=.nan", "learning_rate=.inf", "ebft_feature_layers=[true]", "seed=1.5", "seed='3x'"]
)
def test_values_of_another_nature_are_refused(tmp_path: Path, override: str) -> None:
    assert override.partition("=")[0] in refusal(tmp_path, "", override)


def test_text_fields_take_an_override_as_it_stands(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, ""), ["output_dir=2026-01-01", "train_dataset=123", "system_prompt=Answer: yes or no"])
    assert loaded.config.run.output_dir == "2026-01-01"
    assert loaded.config.data.train_dataset == "123"
    assert loaded.config.data.system_prompt == "Answer: yes or no"


def test_dotted_override_reaches_into_a_mapping(tmp_path: Path) -> None:
    recipe = write(tmp_path, "generation_kwargs: {top_p: 0.9}\n")
    assert load_recipe(recipe, ["generation_kwargs.top_k=5"]).config.rollout.generation_kwargs == {"top_p": 0.9, "top_k": 5}
    assert "seed is not a mapping" in refusal(tmp_path, "", "seed.x=1")
    message = refusal(tmp_path, "deepspeed: my.json\n", "deepspeed.zero_optimization.overlap_comm=false")
    assert "my.json" in message


def test_null_resets_a_field_whose_axolotl_default_is_null(tmp_path: Path) -> None:
    recipe = write(tmp_path, "scoring_token_budget: 4096\n")
    assert load_recipe(recipe, ["scoring_token_budget=null"]).config.method.scoring_token_budget == 16384


def test_home_is_expanded_in_paths_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_recipe(write(tmp_path, "output_dir: ~/runs\nsystem_prompt: ~/not a path\n")).config
    assert config.run.output_dir == "/home/somebody/runs"
    assert config.data.system_prompt == "~/not a path"


def test_replace_changes_only_what_is_named() -> None:
    config = AsyncEBFTConfig(seed=3, feature_layers=[0.5])
    changed = config.replace(n_samples_per_prompt=8)
    assert changed.rollout.num_generations == 8
    assert {name for name, value in changed.flat().items() if value != config.flat()[name]} == {"num_generations"}
    assert changed.explicit() == {"seed": 3, "ebft_feature_layers": [0.5], "num_generations": 8}
    with pytest.raises(ConfigError, match="did you mean seed"):
        config.replace(sead=1)


def test_constructor_refuses_like_a_recipe() -> None:
    with pytest.raises(ConfigError, match="did you mean num_generations"):
        AsyncEBFTConfig(num_generation=3)
    with pytest.raises(ConfigError, match="data is a section"):
        AsyncEBFTConfig(data="file.jsonl")


def test_settings_of_a_config_are_not_shared() -> None:
    one, other = AsyncEBFTConfig(), AsyncEBFTConfig()
    one.method.ebft_feature_layers.append(0.9)
    assert other.method.ebft_feature_layers == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("scale_rewards: true", "scale_rewards", "group"),
        ("scale_rewards: false", "scale_rewards", "none"),
        ("torch_dtype: torch.bfloat16", "dtype", "bfloat16"),
        ("dtype: fp32", "dtype", "float32"),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", "auto"),
        ("report_to: none", "report_to", []),
    ],
)
def test_other_ways_to_write_a_value_are_translated_and_reported(tmp_path: Path, text: str, field: str, value: object) -> None:
    loaded = load_recipe(write(tmp_path, text + "\n"))
    assert loaded.config.flat()[field] == value
    assert any("is read as" in note for note in loaded.notes)

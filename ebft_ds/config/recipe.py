"""RecipeConfig: all sections of a run of any mode, built from sections, flat names, or a mix."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ebft_ds.config.fields import FIELDS
from ebft_ds.config.sections import (
    SECTIONS,
    CheckpointSection,
    DataSection,
    EngineSection,
    LossSection,
    MethodSection,
    ModelSection,
    MonitorSection,
    OptimSection,
    PeftSection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    VllmSection,
)
from ebft_ds.config.settings import Layer, Setting, Source, read_settings
from ebft_ds.errors import ConfigError

_HOME_FIELDS = frozenset(
    {
        "model_name_or_path",
        "feature_model_name_or_path",
        "train_dataset",
        "eval_dataset",
        "output_dir",
        "resume_from_checkpoint",
        "deepspeed",
        "feature_deepspeed",
    }
)
"""Fields that hold paths: a leading `~/` is expanded."""


class RecipeConfig(BaseModel):
    """Configuration of one run. Attributes are the sections: `config.method.ebft_embed_method`, `config.run.seed`, ...

    The constructor takes sections, flat names, aliases, or a mix:
    `AsyncEBFTConfig(learning_rate=1e-4, ebft_feature_layers=[0.5], data={"prompt_field": "question"})`.
    Errors: ConfigError naming every unknown key (with the nearest known one) and every value that is not allowed.
    Single fields are checked here; what concerns several fields, and fields that a mode has no use for, in `ebft_ds.config.checks`.
    """

    MODE: ClassVar[str]
    """The `mode` of this class's recipes."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this mode that are not those of the fields."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

    model: ModelSection = Field(default_factory=ModelSection)
    peft: PeftSection = Field(default_factory=PeftSection)
    data: DataSection = Field(default_factory=DataSection)
    method: MethodSection = Field(default_factory=MethodSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    vllm: VllmSection = Field(default_factory=VllmSection)
    loss: LossSection = Field(default_factory=LossSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    run: RunSection = Field(default_factory=RunSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    monitor: MonitorSection = Field(default_factory=MonitorSection)

    def __init__(self, **settings: Any) -> None:
        plain = {key: _section_values(value) for key, value in settings.items()}
        source = Source(type(self).__name__)
        layer = read_settings(Setting(key, value, source) for key, value in plain.items())
        super().__init__(**self._build(layer))

    @classmethod
    def from_layer(cls, layer: Layer) -> Self:
        """A configuration from resolved settings; errors name the file and line that the layer knows."""
        sections = cls._build(layer)
        config = cls.__new__(cls)
        BaseModel.__init__(config, **sections)
        return config

    @classmethod
    def _build(cls, layer: Layer) -> dict[str, Section]:
        stated = layer.values.get("mode", cls.MODE)
        if stated != cls.MODE and stated in get_args(FIELDS["mode"].annotation):  # another is refused as a value of the field
            source = layer.sources.get("mode")
            raise ConfigError(f"{f'{source}: ' if source else ''}mode: {stated} is not the mode of {cls.__name__}, which is {cls.MODE}")
        return build_sections(layer, cls.DEFAULTS)

    def flat(self) -> dict[str, Any]:
        """All fields by their flat names."""
        return {name: getattr(self._section(spec.section), name) for name, spec in FIELDS.items()}

    def explicit(self) -> dict[str, Any]:
        """The fields that were set, without those that have their default because nobody set them."""
        return {name: value for name, value in self.flat().items() if name in self._section(FIELDS[name].section).model_fields_set}

    def replace(self, **settings: Any) -> Self:
        """A copy with some fields changed, given by flat names, aliases or sections."""
        source = Source("replace")
        base = Layer(values=self.explicit())
        changes = read_settings((Setting(key, _section_values(value), source) for key, value in settings.items()), base)
        return type(self).from_layer(changes.laid_over(base))

    def sections(self) -> dict[str, dict[str, Any]]:
        """All fields grouped by section, as plain values (what `config.resolved.yaml` holds)."""
        return {section: self._section(section).model_dump() for section in SECTIONS}

    def _section(self, name: str) -> Section:
        section = self.__dict__[name]
        assert isinstance(section, Section)
        return section


def _section_values(value: Any) -> Any:
    """A section object as the mapping of the fields that were set in it."""
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else value


def build_sections(layer: Layer, defaults: Mapping[str, Any]) -> dict[str, Section]:
    """Validate a layer's values section by section; `defaults` stand in for fields that it does not set.

    Errors: one ConfigError that lists every field that is wrong.
    """
    grouped: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    problems: list[str] = []
    for name, value in layer.values.items():
        problem = _unnatural(name, value)
        if problem:
            problems.append(_complaint(layer, name, value, problem))
        else:
            grouped[FIELDS[name].section][name] = _at_home(name, value)
    built: dict[str, Section] = {}
    for section, model in SECTIONS.items():
        try:
            built[section] = model(**grouped[section])
        except ValidationError as error:
            problems.extend(_problems_of(error, layer))
    if problems:
        raise ConfigError("\n".join(problems))
    for name, value in defaults.items():
        if name not in layer.values:
            home = built[FIELDS[name].section]
            setattr(home, name, value)
            home.model_fields_set.discard(name)  # nobody set it
    return built


def _at_home(name: str, value: Any) -> Any:
    if name in _HOME_FIELDS and isinstance(value, os.PathLike):
        value = os.fspath(value)
    return os.path.expanduser(value) if name in _HOME_FIELDS and isinstance(value, str) else value


def _unnatural(name: str, value: Any) -> str | None:
    """What pydantic would let pass: true as a number, and infinities."""
    if isinstance(value, bool) and not FIELDS[name].accepts(bool):
        return "a truth value is not a number or text"
    if isinstance(value, float) and not math.isfinite(value):
        return "the number is not finite"
    if isinstance(value, list) and any(isinstance(item, bool) or (isinstance(item, float) and not math.isfinite(item)) for item in value):
        return "the list holds a truth value or a number that is not finite"
    return None


def _problems_of(error: ValidationError, layer: Layer) -> list[str]:
    """One line a field; a union reports each of its members, of which the first message is enough."""
    first: dict[str, Mapping[str, Any]] = {}
    for item in error.errors(include_url=False):
        first.setdefault(str(item["loc"][0]), dict(item))
    return [_complaint(layer, name, layer.values.get(name), str(item["msg"])) for name, item in first.items()]


def _complaint(layer: Layer, name: str, value: Any, message: str) -> str:
    source = layer.sources.get(name)
    place = f"{source}: " if source else ""
    text = message[:1].lower() + message[1:]
    return f"{place}{name}: {value!r} is not allowed: {text}. Allowed: {FIELDS[name].type_text}"

"""Typed configuration: one schema per program, YAML files, `section.key=value` overrides, help made from the types.

    config = load_config(TrainConfig, "configs/quickstart.yaml", ["run.steps=200"])
    print(render(config))          # the resolved config, as YAML that loads back to the same object

Unknown keys, wrong types and keys that contradict each other raise `jaxspec.errors.ConfigError`.
"""

from jaxspec.config.loading import build, load_config, render
from jaxspec.config.schema import Section
from jaxspec.config.serve import EngineSection, MeshSection, ServeConfig, ServerSection
from jaxspec.config.text import add_help, describe
from jaxspec.config.train import (
    DataSection,
    DrafterSection,
    FeaturesSection,
    ObjectiveSection,
    OptimizerSection,
    RunSection,
    TargetSection,
    TrainConfig,
    TrainMeshSection,
)

__all__ = [
    "DataSection",
    "DrafterSection",
    "EngineSection",
    "FeaturesSection",
    "MeshSection",
    "ObjectiveSection",
    "OptimizerSection",
    "RunSection",
    "Section",
    "ServeConfig",
    "ServerSection",
    "TargetSection",
    "TrainConfig",
    "TrainMeshSection",
    "add_help",
    "build",
    "describe",
    "load_config",
    "render",
]

"""The wire contract: the committed modules are what the proto gives, and every field is either served or refused."""

from __future__ import annotations

import dataclasses
import re

from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.serving.admission import SUPPORTED
from jaxspec.serving.protos import build
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb


def test_committed_modules_are_up_to_date(tmp_path):
    modules = {made.name: made for made in build.build(tmp_path)}
    committed = {name: build.ROOT / made.relative_to(tmp_path) for name, made in modules.items()}
    compiler = re.search(r"GRPC_GENERATED_VERSION = .*", modules["jaxspec_pb2_grpc.py"].read_text()).group()
    same_compiler = compiler in committed["jaxspec_pb2_grpc.py"].read_text()
    # Another grpcio-tools writes other boilerplate around the same descriptor.
    for name in build.GENERATED if same_compiler else ["jaxspec_pb2.py"]:
        made, kept = modules[name].read_text(), committed[name].read_text()
        if not same_compiler:
            made, kept = (re.search(r"AddSerializedFile\(.*\)", text).group() for text in (made, kept))
        assert kept == made, f"{name} is stale: python -m jaxspec.serving.protos.build"


def test_published_names():
    assert pb.DESCRIPTOR.name == "jaxspec/v1/jaxspec.proto"
    service = pb.DESCRIPTOR.services_by_name["Generation"]
    assert service.full_name == "jaxspec.v1.Generation"
    assert [(method.name, method.server_streaming) for method in service.methods] == [
        ("Generate", True),
        ("GetModelInfo", False),
        ("GetStatus", False),
    ]


def test_every_supported_name_is_a_field():
    messages = pb.DESCRIPTOR.message_types_by_name
    for message, names in SUPPORTED.items():
        assert names <= set(messages[message].fields_by_name), message


def test_every_sampling_parameter_is_on_the_wire():
    served = {field.name for field in dataclasses.fields(SamplingParams)} - {"rules"}
    rules = {field.name for field in dataclasses.fields(LogitRules)} - {"min_tokens"}
    assert served | rules | {"min_new_tokens", "n", "grammar"} == SUPPORTED["SamplingParameters"]

"""Regenerates the committed protobuf modules: `python -m jaxspec.serving.protos.build` (needs grpcio-tools)."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

ROOT = Path(__file__).parent
PROTO = "jaxspec/v1/jaxspec.proto"
GENERATED = ("jaxspec_pb2.py", "jaxspec_pb2.pyi", "jaxspec_pb2_grpc.py")
# The proto is published as jaxspec/v1/jaxspec.proto, and protoc knows no more; its module lives below this package.
PROTOC_IMPORT = "from jaxspec.v1 import jaxspec_pb2"
PACKAGE_IMPORT = "from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2"


def build(out: Path = ROOT) -> list[Path]:
    """Writes the generated modules below `out` (in jaxspec/v1), returns their paths; RuntimeError if protoc fails."""
    from grpc_tools import protoc  # a development tool, not a dependency of the server

    out.mkdir(parents=True, exist_ok=True)
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, PROTO])
    if status:
        raise RuntimeError(f"protoc ended with status {status} on {PROTO}")
    paths = [out / "jaxspec" / "v1" / name for name in GENERATED]
    stub = paths[-1]
    source = stub.read_text(encoding="utf-8")
    if PROTOC_IMPORT not in source:
        raise RuntimeError(f"{stub.name}: expected {PROTOC_IMPORT!r}; adapt PROTOC_IMPORT to what protoc now writes")
    stub.write_text(source.replace(PROTOC_IMPORT, PACKAGE_IMPORT), encoding="utf-8")
    return paths


if __name__ == "__main__":
    for path in build():
        print(path.relative_to(ROOT))
    sys.exit(0)

"""The wire contract: `jaxspec/v1/jaxspec.proto` and the modules generated from it (see build.py)."""

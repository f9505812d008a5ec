"""Generated from jaxspec.proto."""

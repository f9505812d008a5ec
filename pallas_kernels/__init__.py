"""Kernels that the field's libraries do not hold, each with a plain reference beside it. Imports nothing of jaxspec."""

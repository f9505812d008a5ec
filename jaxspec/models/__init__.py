"""Target decoders and the layout every forward shares: one config-driven module for the Llama and Qwen families."""

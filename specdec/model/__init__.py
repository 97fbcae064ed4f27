"""The target model and what it runs on: transformers models over a slot cache, packed and tensor-parallel linear layers."""

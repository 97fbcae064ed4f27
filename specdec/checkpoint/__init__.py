"""Drafter checkpoints: `native` is ours, one directory of JSON and safetensors."""

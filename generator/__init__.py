"""Generators: claim prompts, run the vLLM engine, push rollout groups, follow weight rounds."""

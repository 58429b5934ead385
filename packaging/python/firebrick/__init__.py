"""Post-training of language models: the wheel of the `firebrick` program. There is no Python API."""

"""Drives any OpenAI or SGLang endpoint with a workload, on schedule whatever the answers."""

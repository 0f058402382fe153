"""The simulated engine as a process: to its clients, its sidecar and its router it is an SGLang server with RLT."""

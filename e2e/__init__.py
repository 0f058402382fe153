"""End-to-end tests on a Kubernetes cluster with a real node."""

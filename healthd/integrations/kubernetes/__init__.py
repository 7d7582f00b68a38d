"""Kubernetes: taints on nodes."""

"""Kubernetes: conditions and taints of nodes, maintenance, pods that have devices and leases, service accounts."""

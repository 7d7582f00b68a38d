"""Profiles of slow probes: of operations by torch, of compiled programs by `neuron-profile`. Nothing here judges."""

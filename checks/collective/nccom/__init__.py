"""Collectives by nccom-test, the collectives test of AWS Neuron."""

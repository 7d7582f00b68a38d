"""Neuron devices through sysfs and the Neuron tools; nothing here touches a device."""

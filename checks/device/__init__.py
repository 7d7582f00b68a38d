"""
Tensor-op probes of one device, written once for any accelerator: they know a device only as `ctx.device`.

Every value that is judged comes through `device.read` and every time through `device.measure`. No torch at import.
"""

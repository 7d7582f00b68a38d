"""
One training step of a small decoder-only transformer, written once for any accelerator: `checks.contract.Device` alone.

`places` names every layer and operation, `model` computes them, `step` runs forward, backward and optimizer and keeps
what each operation gave, `digests` and `reference` say whether that is the same and whether it is right, `judge`
compares devices. No torch at import.
"""

"""
Quarantine by rule: time in the verdict.

`judge` decides for one node and is pure; `facts` says what it may see of a node; `book` holds what is remembered and
carries out what was decided. What one result says of a node, and what a gate makes of it, must not enter here.
"""

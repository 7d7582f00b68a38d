"""Instances of EC2: who they are, by the documents that AWS signs for them."""

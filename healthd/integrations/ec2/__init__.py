"""The identity of EC2 instances, from the documents that AWS signs for them."""

"""Who a caller is and what it may do."""

__all__ = ["tokens"]

"""HTTP for programs. It reaches everything through the controller."""

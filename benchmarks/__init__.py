"""How fast each contender trains the same work."""

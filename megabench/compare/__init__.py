"""A study from its first trial to its report."""

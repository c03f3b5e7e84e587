"""What each engine accepts and costs, without torch."""

"""How buckets of packed weights reach the processes that serve them."""

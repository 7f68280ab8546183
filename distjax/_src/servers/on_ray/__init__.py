"""An engine whose workers and servers are Ray processes."""

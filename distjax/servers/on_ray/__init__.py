"""An engine whose workers and servers are processes of Ray."""
